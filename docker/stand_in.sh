#!/usr/bin/env bash
# Builds docker/Dockerfile twice, compares the two images and runs what is in them, without a container engine and without NVIDIA's
# registry: `make test-image`, as root on Debian 12, 10 GB in WORK. The base is a stand-in for NVIDIA's image: Debian with this
# machine's torch under the version that NVIDIA's has, packages named as Transformer Engine and Apex, older packages of its own with
# a constraint file that nails them down, an entry point, and the CUDA toolkit of this machine (without one the kernels are built
# for the CPU only). It is made once and kept in WORK.
set -euo pipefail
cd "$(dirname "$0")/.."

WORK=${WORK:-/tmp/megakit-image}
DRIVER=${DRIVER:-vfs}
CUDA=${CUDA:-$(readlink -f /usr/local/cuda* 2>/dev/null | sort | tail -1)}
ROOT=$WORK/rootfs
SITE=$ROOT/usr/local/lib/python3.11/dist-packages
BASE=localhost/stand-in
TORCH=2.13.0a0+8145d630e8.nv26.6.54250401
mkdir -p "$WORK"

engine() { buildah --storage-driver "$DRIVER" --root "$WORK/storage" --runroot "$WORK/run" "$@"; }

run() { # CONTAINER USER COMMAND...
    engine run --isolation chroot --user "$2" "$1" -- "${@:3}"
}

fail() { echo "failed: $*" >&2 && exit 1; }

package() { # NAME VERSION: one that can be found and imported
    mkdir -p "$SITE/$1" "$SITE/$1-$2.dist-info"
    echo "__version__ = '$2'" >"$SITE/$1/__init__.py"
    printf 'Metadata-Version: 2.1\nName: %s\nVersion: %s\n' "$1" "$2" >"$SITE/$1-$2.dist-info/METADATA"
}

fill() { # the root folder of the stand-in
    rm -rf "$ROOT"
    debootstrap --variant=minbase --include=python3,python3-pip,python-is-python3,ca-certificates,g++ bookworm "$ROOT" >"$WORK/debootstrap.log"
    python3.11 -m pip install --quiet --target "$SITE" torch==2.13.0 numpy packaging==24.2 rich==14.0.0
    mv "$SITE"/torch-*.dist-info "$SITE/torch-$TORCH.dist-info"
    sed -i "s/^Version: .*/Version: $TORCH/" "$SITE/torch-$TORCH.dist-info/METADATA"
    package transformer_engine 2.16.0+4220403e
    package apex 0.1
    mkdir -p "$ROOT/etc/pip" "$ROOT/opt/nvidia" "$ROOT/workspace"
    printf 'torch==%s\npackaging==24.2\nrich==14.0.0\nPyYAML==6.0.1\n' "$TORCH" >"$ROOT/etc/pip/constraint.txt"
    # shellcheck disable=SC2016 # $@ is the script's
    printf '#!/bin/sh\nexec "$@"\n' >"$ROOT/opt/nvidia/nvidia_entrypoint.sh"
    chmod +x "$ROOT/opt/nvidia/nvidia_entrypoint.sh"
    chroot "$ROOT" useradd --create-home --uid 1000 ubuntu
    cp /etc/ssl/certs/ca-certificates.crt "$ROOT/etc/ssl/certs/"
    printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n' >"$ROOT/etc/pip.conf"
    if [ -x "$CUDA/bin/nvcc" ]; then mkdir -p "$ROOT/usr/local/cuda" && cp -a "$CUDA/." "$ROOT/usr/local/cuda/"; fi
}

base() {
    [ ! -e "$WORK/base.done" ] || return 0
    fill
    local container
    container=$(engine from scratch)
    engine copy --quiet "$container" "$ROOT" / >/dev/null
    engine config --entrypoint '["/opt/nvidia/nvidia_entrypoint.sh"]' --env PIP_CONSTRAINT=/etc/pip/constraint.txt \
        --env PATH=/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
    engine commit --quiet --rm "$container" "$BASE" >/dev/null
    touch "$WORK/base.done"
}

build() { # TAG KERNELS
    engine build --isolation chroot --network host --no-cache --timestamp 0 --file docker/Dockerfile --build-arg BASE="$BASE" \
        --build-arg REVISION="$(git rev-parse HEAD)" --build-arg KERNELS="$2" --tag "$1" . >"$WORK/$1.log" 2>&1 \
        || { tail -20 "$WORK/$1.log" && fail "the build of $1: $WORK/$1.log"; }
}

added() { # CONTAINER: files that are not the base's, or not as the base has them
    diff -rq --no-dereference "$ROOT" "$(engine mount "$1")" 2>/dev/null | grep -v "/dev/\|: dev$\|: proc$\|: sys$" \
        | sed "s#$WORK/storage/[a-z]*/dir/[0-9a-f]*##g; s#$ROOT##g" || true
}

{ command -v buildah && command -v debootstrap; } >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends buildah debootstrap; }
base
KERNELS=emulated
[ -x "$ROOT/usr/local/cuda/bin/nvcc" ] && KERNELS="cuda emulated"
for tag in first second; do
    SECONDS=0
    build "$tag" "$KERNELS"
    echo "$tag: $SECONDS s, $(engine images --quiet --no-trunc "localhost/$tag")"
done
[ "$(engine images --quiet --no-trunc localhost/first)" = "$(engine images --quiet --no-trunc localhost/second)" ] || fail "the two images differ"

container=$(engine from localhost/first)
trap 'engine rm "$container" >/dev/null' EXIT
echo "beside the base:" && added "$container"
for user in 10001:10001 12345:12345; do
    # shellcheck disable=SC2086 # a list of words
    run "$container" "$user" python /opt/megakit/check_image.py --kernels $KERNELS
    run "$container" "$user" python -m megakit.pretrain +recipe=gpt2_124m data=mock run.shrink=true train.tokens=null train.steps=2 "run.dir=/tmp/run-${user%:*}" \
        >"$WORK/train.log" 2>&1 || { tail -5 "$WORK/train.log" && fail "two steps of training as $user: $WORK/train.log"; }
done
if run "$container" 10001:10001 python /opt/megakit/check_image.py --kernels emulated --require flash_attn; then fail "a missing library passed"; fi
echo "the image is reproducible and whole"
