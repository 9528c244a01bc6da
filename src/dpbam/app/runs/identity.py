"""What a statement is about: digests of the files and the settings; and the operator's signature.

The signature is Ed25519 over the bytes of ``privacy-statement.json``, which holds the SHA-256 of
the model's files: signing it is vouching for them. Of an exported folder it is over
``exported.json``, which holds those of all its files, the statement among them. Ed25519 is in the
package ``cryptography``, the extra ``sign``; anyone can check it with ``openssl pkeyutl -verify
-rawin``, too.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpbam.app.runs.documents import DamagedFileError, Identity, Signature
from dpbam.app.runs.escaping import each_text
from dpbam.app.runs.facts import versions
from dpbam.app.runs.run import RunError
from dpbam.app.runs.settings import settings
from dpbam.errors import ArgumentError

if TYPE_CHECKING:
    from dpbam.app.runs.config import RunConfig
    from dpbam.app.runs.folder import RunFolder

EXPORTED = "exported.json"


def identity(folder: RunFolder, config: RunConfig) -> Identity:
    """Return what names the model: date, SHA-256 of its files and of the settings, versions."""
    files = (folder.weights, folder.model, folder.statistics, folder.class_counts, folder.centre)
    return Identity(
        date=today(),
        files={path.name: file_digest(path) for path in files if path.exists()},
        configuration_sha256=config_digest(config),
        versions=versions(),
    )


def today() -> str:
    """The day, in UTC: a time of day would say how long the training took."""
    return datetime.now(UTC).date().isoformat()


def file_digest(path: Path) -> str:
    """Return SHA-256 of a file's bytes, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def config_digest(config: RunConfig) -> str:
    """Return SHA-256 of the settings as JSON, keys sorted, without seeds and paths.

    A path would differ between machines, and let anyone try out names of users and folders.
    Settings of the type ``Path`` are left out. Any text may be a path, whatever its setting is
    meant for: of ``/home/ann/scans`` the last part enters, ``scans``, which is a name in any case.
    What the files were is known by their content, as ``public_weights`` of the statement.
    """
    # a digest of the seed would let anyone try out seeds, and subtract the noise
    hidden = {one.name for one in settings(type(config)) if one.type is Path or one.policy.secret}
    digested = {k: v for k, v in config.to_mapping().items() if k not in hidden}
    text = json.dumps(each_text(digested, _last_part), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _last_part(name: str) -> str:
    """Return a name without the folders before it; a prefix such as ``hf:`` stays.

    Example:
        >>> _last_part("hf:/home/ann/tiny-vit"), _last_part("./scans/"), _last_part("net:make")
        ('hf:tiny-vit', 'scans', 'net:make')
    """
    prefix, colon, rest = name.rpartition(":")
    return f"{Path(prefix).name}{colon}{Path(rest).name}"


def signed_files(folder: RunFolder) -> tuple[Path, Path]:
    """Return the file that a signature of this folder covers, and the signature's."""
    exported = folder.path / EXPORTED
    if is_export(folder):
        return exported, exported.with_suffix(".sig")
    return folder.statement_json, folder.signature


def is_export(folder: RunFolder) -> bool:
    """Whether ``dpbam export`` wrote the folder: it is no run's, which has a ledger."""
    return (folder.path / EXPORTED).is_file() and not folder.ledger.exists()


def exported_files(folder: RunFolder) -> dict[str, str]:
    """Return SHA-256 of each file of an export, except of its list of files and the signature."""
    excluded = {path.name for path in signed_files(folder)}
    files = {p.relative_to(folder.path).as_posix(): p for p in folder.path.rglob("*")}
    return {
        n: file_digest(p) for n, p in sorted(files.items()) if n not in excluded and p.is_file()
    }


def write_signature(folder: RunFolder, key: Path) -> str:
    """Sign the statement, or an export's digests, with an Ed25519 key (PEM); return the public key.

    It looks at nothing but that file: :func:`dpbam.app.audit.check.sign` checks before.

    Raises:
        RunError: if there is no statement.
        ArgumentError: if there is no such key, or no package for it.
    """
    ed25519, serialization = _cryptography()
    covered, target = signed_files(folder)
    if not covered.is_file():
        raise RunError(f"there is no statement in {folder.path}: finish the run first")
    make_one = "make one with openssl genpkey -algorithm ed25519 -out operator.pem"
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentError(f"the key {key} cannot be read ({error}): {make_one}") from None
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise ArgumentError(f"the key {key} is not an Ed25519 key: {make_one}")
    signature = private.sign(covered.read_bytes())
    public: str = private.public_key().public_bytes_raw().hex()
    encoded = base64.b64encode(signature).decode()
    Signature(format=1, algorithm="Ed25519", public_key=public, signature=encoded).write(target)
    return public


def verified(folder: RunFolder) -> str:
    """Return the public key whose owner signed the folder's files as they are, or RunError."""
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    covered, path = signed_files(folder)
    try:
        stored = Signature.read(path)
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(stored.public_key))
        signature = base64.b64decode(stored.signature, validate=True)
        public.verify(signature, covered.read_bytes())
    except (InvalidSignature, DamagedFileError, TypeError, ValueError):
        raise RunError(
            f"{path} is no signature of {covered.name} as it is: one of the "
            "two was changed; ask the operator, who can sign again"
        ) from None
    return stored.public_key


def public_key(path: Path) -> str:
    """Read a public key in PEM, and return its 32 bytes in hexadecimal digits."""
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_pem_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the public key {path} cannot be read: {error}") from None
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise ArgumentError(f"the public key {path} is not an Ed25519 key")
    return str(key.public_bytes_raw().hex())


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ArgumentError(
            "signatures need the package cryptography: pip install 'dpbam[sign]'"
        ) from None
    return ed25519, serialization
