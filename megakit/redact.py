"""Secrets, kept out of what is saved and told: the one place that knows what looks like one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from urllib.parse import quote

_NAME = re.compile(
    r"""(?ix) password | passwd | passphrase | secret | api_?key | credential
    | (^|_) (token | access_key | private_key | webhook | pat | jwt | cookie | creds?) ($|_)
    | (^|_) key \d* $ | _pwd $ | (^|_|ssh|pg) pass $"""
)
_NAME_OF_A_PLACE = re.compile(r"(?i)_(file|path|dir|sock|socket)$")
"""WANDB_IDENTITY_TOKEN_FILE says where it is."""
_LONG_ENOUGH = 8
"""Characters of a variable's value: shorter ones would be found in any text."""
_PLACES = re.compile(
    r"""(?ix)
    :// [^/\s:@'"]* : (?P<password>[^/\s@'"]+) @                       # https://user:PASSWORD@host
    | :// (?P<user>[^/\s:@'"]{20,}) @                                  # https://TOKEN@host
    | [?&] (?:x-amz-(?:signature|security-token|credential) | x-goog-(?:signature|credential) | sig | signature | token
        | access_token | api_?key | key | password ) = (?P<query>[^&\s'"\#]+)          # of a signed URL
    | \b authorization ["']? \s* [:=] \s* ["']? (?:(?:bearer|basic|token) \s+)? (?P<header>[^\s'"$]{8,})
    | \b (?P<key>(?-i:hf_(?=[a-z0-9]{0,40}[A-Z])[a-zA-Z0-9]{20,} | sk-(?=[\w-]{0,60}[A-Z])(?=[\w-]{0,60}[0-9])[\w-]{20,})
        | gh[opsur]_[a-z0-9]{20,} | github_pat_\w{20,} | glpat-[\w-]{20,} | nvapi-[\w-]{20,} | xox[abprs]-[\w-]{10,}
        | (?-i:A[KS]IA[0-9A-Z]{16} | AIza[\w-]{35} | eyJ[\w-]{10,400}\.eyJ[\w-]{2,}\.[\w-]+) | wandb_v\d_\w{20,}) \b
    """
)
"""What tells a secret without knowing its value; each alternative has one group, the secret."""
_KINDS = {
    "password": "a password in a URL",
    "user": "a token in a URL",
    "query": "a signature or token in a URL",
    "header": "a header of a login",
    "key": "a key",
}
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""All but the ends of lines and tabs; marks that turn the direction of writing; halves of surrogate pairs."""
_ASSIGNED = re.compile(r"""(?:\b(\w+)=|--([\w-]{1,100})[=\s]\s{0,9})(?=["']?([^\s"'$`;&|<>(){}-][^\s"'`;]{7,100}))""")
"""NAME=VALUE or --name VALUE of a shell, the value as it is."""
_LOGIN = re.compile(r"""\blogin\b[^;&|\n]{0,200}?[\s"'](?=[a-zA-Z_]{0,60}\d)\w{20,}(?=[\s"';]|$)""")
"""`wandb login KEY`."""


def names_a_secret(name: str) -> bool:
    """Whether a variable of that name may hold one."""
    name = name.replace("-", "_")
    return _NAME.search(name) is not None and not _NAME_OF_A_PLACE.search(name)


def redact(text: str, env: Mapping[str, str] | None = None) -> str:
    """`text` with *** for passwords, keys and signatures in it, and for the values of secrets in `env` (None: the process's)."""
    values = {value for _, value in _values(os.environ if env is None else env)}
    written = {as_written for value in values for as_written in (value, quote(value, safe=""), quote(value), repr(value)[1:-1])}
    for value in sorted(written, key=len, reverse=True):  # one may be a part of another
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
    if _LOGIN.search(text):
        return "what looks like a key for a login"
    return secret_in(text)


def _values(env: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names and values of the secrets in an environment; a path, as of a file with a token, is none, nor is a number:
    TOKEN_BUDGET, which would be taken out of every message."""
    for name, value in env.items():
        if names_a_secret(name) and len(value) >= _LONG_ENOUGH and not value.startswith("/") and not value.isdecimal():
            yield name, value
