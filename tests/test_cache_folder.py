"""A cache folder that is full, read-only, gone or open to others is one warning, and entries are made as without it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft import cache_folder, knobs
from weft.errors import CacheUnusable

NAME = "ab" + "0" * 62


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "weft")
    cache_folder._warn.cache_clear()
    return caplog


def _fails(code: int) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        (tempfile, "mkstemp", errno.ENOSPC),
        (os, "replace", errno.ENOSPC),
        (tempfile, "mkstemp", errno.EROFS),
        (os, "replace", errno.EDQUOT),
        (tempfile, "mkstemp", errno.ESTALE),
    ],
)
def test_a_folder_that_takes_no_more_is_one_warning(
    module: Any, name: str, code: int, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    with knobs.override(cache_dir=str(tmp_path / "cache")):
        path = cache_folder.entry_path("kernels", NAME)
        assert cache_folder.write_checked(path, b"before")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, name, _fails(code))
            assert not any(cache_folder.write_checked(path, b"after") for _ in range(3))
            assert cache_folder.read_checked(path) == b"before"
        assert [each.name for each in path.parent.iterdir()] == [NAME]  # no unfinished file is left
        assert cache_folder.write_checked(path, b"after")
    (record,) = warnings.records
    assert str(tmp_path / "cache") in record.getMessage()
    assert "WEFT_CACHE_DIR" in record.getMessage()


def test_a_full_disk_is_one_warning(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with knobs.override(cache_dir=str(tmp_path)):
        path = cache_folder.entry_path("graphs", NAME)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # a file takes no more than this
            assert not cache_folder.write_checked(path, b"x" * 5000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, handler)
        assert cache_folder.read_checked(path) is None
        assert not [*path.parent.iterdir()]
    assert len(warnings.records) == 1


def test_a_folder_that_vanished_is_made_again(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    with knobs.override(cache_dir=str(tmp_path / "a" / "cache")):
        path = cache_folder.entry_path("kernels", NAME)
        cache_folder.write_checked(path, b"content")
        shutil.rmtree(tmp_path / "a")
        assert cache_folder.read_checked(path) is None
        assert cache_folder.write_checked(path, b"again")
        assert cache_folder.read_checked(path) == b"again"
    assert not warnings.records


def test_all_folders_of_the_cache_are_for_this_user_alone(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        with knobs.override(cache_dir=str(tmp_path / "a" / "cache")):
            path = cache_folder.entry_path("kernels", NAME)
            cache_folder.write_checked(path, b"content")
    finally:
        os.umask(mask)
    modes = {each: stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "a").rglob("*")}
    assert modes == {each: 0o600 if each.is_file() else 0o700 for each in modes}
    assert path in modes


def _a_file(where: Path) -> None:
    where.write_text("")


def _open_to_all(where: Path) -> None:
    where.mkdir()
    where.chmod(0o777)


def _of_a_user_without_a_home(where: Path) -> None:
    pass


@pytest.mark.parametrize("prepare", [_a_file, _open_to_all, _of_a_user_without_a_home])
def test_without_a_usable_folder_nothing_is_kept(
    prepare: Callable[[Path], None], tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    where = str(tmp_path / "cache") if prepare is not _of_a_user_without_a_home else "~no such user/cache"
    with knobs.override(cache_dir=where):
        path = cache_folder.entry_path("graphs", NAME)
        for _ in range(3):
            assert not cache_folder.usable()
            assert not cache_folder.write_checked(path, b"content")
            assert cache_folder.read_checked(path) is None
        with pytest.raises(CacheUnusable):
            cache_folder.directory()
    (record,) = warnings.records
    assert where in record.getMessage()
    assert {each.name for each in tmp_path.iterdir()} <= {"cache"}
    with contextlib.suppress(NotADirectoryError, FileNotFoundError):
        assert not [*(tmp_path / "cache").iterdir()]


def test_no_name_means_no_cache_and_no_warning(
    tmp_path: Path, warnings: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with knobs.override(cache_dir=""):
        path = cache_folder.entry_path("graphs", NAME)
        assert not cache_folder.write_checked(path, b"content")
        assert cache_folder.read_checked(path) is None
    assert not warnings.records
    assert not [*tmp_path.iterdir()]


def test_two_writers_of_one_entry_leave_a_whole_one(tmp_path: Path) -> None:
    """Four processes write four contents of a megabyte again and again; whatever is read is one of the four."""
    contents = [bytes([97 + k]) * (1 << 20) for k in range(4)]
    with knobs.override(cache_dir=str(tmp_path)):
        path = cache_folder.entry_path("graphs", NAME)
        cache_folder.write_checked(path, contents[0])
        children = []
        for content in contents:
            if (child := os.fork()) == 0:
                for _ in range(20):
                    cache_folder.write_checked(path, content)
                os._exit(0)
            children.append(child)
        seen = {cache_folder.read_checked(path) for _ in range(40)}
        assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
        assert seen <= set(contents)
        assert cache_folder.read_checked(path) in contents
        assert [each.name for each in path.parent.iterdir()] == [NAME]
