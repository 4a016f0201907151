"""Secrets, kept out of what is saved and told: the one place that knows what looks like one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

_NAME = re.compile(
    r"(?i)(^|_)(token|secret|password|passwd|passphrase|credentials?|api_?key|access_key|private_key|webhook|pat)($|_)|(^|_)key$"
)
_LONG_ENOUGH = 8
"""Characters of a variable's value: shorter ones would be found in any text."""
_PLACES = re.compile(
    r"""(?ix)
    :// [^/\s:@'"]* : (?P<password>[^/\s@'"]+) @                       # https://user:PASSWORD@host
    | :// (?P<user>[^/\s:@'"]{20,}) @                                  # https://TOKEN@host
    | [?&] (?:x-amz-(?:signature|security-token|credential) | x-goog-(?:signature|credential) | sig | signature | token
        | access_token | api_?key | key | password ) = (?P<query>[^&\s'"\#]+)          # of a signed URL
    | \b (?P<key>hf_[a-z]{20,} | gh[opsur]_[a-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,} | sk-[\w-]{20,}
        | nvapi-[\w-]{20,} | xox[abprs]-[\w-]{10,} | (?-i:AKIA[0-9A-Z]{16}) | wandb_v\d_\w{20,}) \b
    """
)
"""What tells a secret without knowing its value; each alternative has one group, the secret."""
_KINDS = {"password": "a password in a URL", "user": "a token in a URL", "query": "a signature or token in a URL", "key": "a key"}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but the ends of lines and tabs; marks that turn the direction of writing; halves of surrogate pairs."""
_ASSIGNED = re.compile(r"""(?:\b(\w+)=|--([\w-]+)[=\s]\s*)(?=["']?([^\s"'$`;&|<>(){}-][^\s"'`;]{7,}))""")
"""NAME=VALUE or --name VALUE of a shell, the value as it is."""


def names_a_secret(name: str) -> bool:
    """Whether a variable of that name may hold one."""
    return _NAME.search(name.replace("-", "_")) is not None


def redact(text: str, env: Mapping[str, str] | None = None) -> str:
    """`text` with *** for passwords, keys and signatures in it, and for the values of secrets in `env` (None: the process's)."""
    for _, value in _values(os.environ if env is None else env):
        text = text.replace(value, "***")
    return _PLACES.sub(lambda found: found[0].replace(found[str(found.lastgroup)], "***"), text)


def printable(text: str) -> str:
    """`text` with escapes for what a terminal would act upon: names and texts in files may be anybody's."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def secret_in(text: str, env: Mapping[str, str] | None = None) -> str | None:
    """What of a secret is in a text, in words that don't have it: the value of WANDB_API_KEY. None: nothing."""
    for name, value in _values(os.environ if env is None else env):
        if len(value) >= 2 * _LONG_ENOUGH and value in text:
            return f"the value of {name}"
    found = _PLACES.search(text)
    return _KINDS[str(found.lastgroup)] if found else None


def secret_in_shell(text: str) -> str | None:
    """The same of a line of a shell: also one that gives a secret's name a value which is no variable or file."""
    for variable, option, value in _ASSIGNED.findall(text):
        name = variable or f"--{option}"
        if names_a_secret(name.strip("-")) and not value.startswith(("/", "~", "./")):
            return f"what looks like the value of {name}"
    return secret_in(text)


def _values(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names and values of the secrets in an environment; a path, as of a file with a token, is none."""
    for name, value in env.items():
        if names_a_secret(name) and len(value) >= _LONG_ENOUGH and not value.startswith("/"):
            yield name, value
