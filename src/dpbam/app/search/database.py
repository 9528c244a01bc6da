"""Databases that several machines share: what their errors say, and what they may show."""

from __future__ import annotations

from types import ModuleType

from dpbam.app.runs.config import ConfigError


def sqlalchemy() -> ModuleType:
    """The library.

    Raises:
        ConfigError: if it is not installed.

    Example:
        >>> sqlalchemy().__name__
        'sqlalchemy'
    """
    try:
        import sqlalchemy
    except ImportError:
        raise ConfigError(
            "--storage needs SQLAlchemy, which comes with Optuna: pip install 'dpbam[search]'"
        ) from None
    return sqlalchemy


def unusable(url: str, error: Exception) -> ConfigError:
    """What to raise when a database cannot be opened, whatever its driver raised.

    Example:
        >>> unusable("sqlite:///x.db", OSError("no such folder"))
        ConfigError('the storage sqlite:///x.db cannot be used: no such folder')
    """
    return ConfigError(f"the storage {without_password(url)} cannot be used: {first_line(error)}")


def without_password(url: str) -> str:
    """A database's address as it may be shown.

    Example:
        >>> without_password("postgresql://me:secret@host/db")
        'postgresql://me:***@host/db'
    """
    sql = sqlalchemy()
    try:
        shown: str = sql.make_url(url).render_as_string(hide_password=True)
    except sql.exc.ArgumentError:
        return "given" if "@" in url else url
    return shown


def first_line(error: Exception) -> str:
    """Of its message; its kind if it has none.

    Example:
        >>> first_line(ValueError("one")), first_line(ValueError())
        ('one', 'ValueError')
    """
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
