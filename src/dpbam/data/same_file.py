"""One file is one record, however it is spelled or linked.

A file listed as ``a.png`` and as ``./a.png``, in another case where case does not count, by a
symbolic link or by a hard link would be two records of one person, whose privacy would be half of
what is promised. The system's own identity of a file (device and inode) sees through all of them.
"""

from __future__ import annotations

from pathlib import Path

from dpbam.data.base import DataError


class OneRecordPerFile:
    """Refuses a file that was added before, under whatever name.

    Args:
        where: names the folder or the table, for the message.

    Example:
        >>> files = OneRecordPerFile("this folder")
        >>> files.add(Path(__file__), "same_file.py")
        >>> files.add(Path(__file__).parent / "." / Path(__file__).name, "./same_file.py", line=3)
        Traceback (most recent call last):
        dpbam.data.base.DataError: this folder lists one file twice, as same_file.py and as ...
    """

    def __init__(self, where: str | Path) -> None:
        self._where = where
        self._seen: dict[tuple[int, int], str] = {}

    def add(self, path: Path, spelling: str, line: int | None = None) -> None:
        """Take in an existing file.

        Raises:
            DataError: naming both spellings, if it is there already.
        """
        told = spelling if line is None else f"{spelling} (line {line})"
        stat = path.stat()  # follows links
        key = (stat.st_dev, stat.st_ino)
        if key in self._seen:
            raise DataError(
                f"{self._where} lists one file twice, as {self._seen[key]} and as {told}: it would "
                "count as two records, each with half of the promised privacy; leave one out or, "
                "if they are different records with the same content, make copies instead of links"
            )
        self._seen[key] = told
