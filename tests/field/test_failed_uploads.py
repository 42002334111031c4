"""A failed upload leaves no file on disk. A user saw: an upload whose name was half a surrogate got a 500, and its
content stayed on the disk uncounted (issue 56, item 4). Also, eight concurrent uploads passed the limit together.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.common.errors import InvalidRequest
from quire.server.durability.data_dir import open_data_dir
from quire.server.durability.data_dir_rpc import remote_data_dir, serve_data_dir_call
from quire.server.store.files import new_file
from tests.server.api import Api
from tests.server.routes.test_batches import keeping

A = "a"
MIB = 1 << 20


def form(name: bytes, content: bytes = b"{}", purpose: bytes = b"batch", disposition: bytes = b"filename=") -> bytes:
    """`name` is written between quotes after `disposition`."""
    parts = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n%s\r\n' % purpose,
        b'--b\r\nContent-Disposition: form-data; name="file"; %s"%s"\r\n\r\n%s\r\n' % (disposition, name, content),
    )
    return b"".join(parts) + b"--b--\r\n"


async def post(api: Api, body: Any, kind: str = "multipart/form-data; boundary=b") -> httpx.Response:
    return await api.http.post("/v1/files", content=body, headers={"content-type": kind})


def on_disk(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "files").iterdir())


async def listed_file_ids(api: Api) -> list[str]:
    return sorted([file.id async for file in api.openai.files.list()])


CHARSETS = (
    *("utf-8", "UTF8", "utf-7", "utf-16", "utf-16-le", "utf-32", "idna", "punycode", "latin-1", "cp037", "shift_jis"),
    *("unicode_escape", "raw_unicode_escape", "undefined", "rot13", "hex", "base64", "zlib", "mbcs", "oem", "uu"),
    *("utf-8-sig", "iso2022_jp", "hz", "charmap", "a.b", "..", "", " ", "x" * 5000, "\u00e9", "__main__", "quopri"),
)
NAMES = (
    *(b"+2AA-.jsonl", b"\\ud800.jsonl", b"\xed\xa0\x80.jsonl", b"\xff\xfe", b"xn--", b"a" * 1000, b"", b" ", b"."),
    *(b"..", b"../../../etc/passwd", b"C:\\x\\y.jsonl", b"%ed%a0%80", b"a;b", b'a\\"b', "ü中😀".encode()),
)


async def test_upload_with_odd_charset_or_filename_returns_200_or_400(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        kinds = ["multipart/form-data; boundary=b; charset=" + each for each in CHARSETS]
        kinds += [kind.replace("charset=", "charset*=utf-8''") for kind in kinds[:3]]
        kinds += ['Multipart/Form-Data; Boundary="b"', "multipart/form-data;boundary=b;;;=;charset"]
        requests = [(kind, name) for kind in kinds for name in NAMES[:5]] + [(kinds[0], name) for name in NAMES]
        for kind, name in requests:
            headers = [(b"content-type", kind.encode("latin-1"))]
            answer = await api.http.post("/v1/files", content=form(name), headers=headers)
            assert answer.status_code in (200, 400), (kind, name, answer.text)
            answer.text.encode()
        for disposition in (b"filename*=utf-8''", b"filename=\"x\"; filename*=utf-7''", b"filename*0=", b"FILENAME="):
            answer = await post(api, form(b"%ED%A0%80+2AA-", disposition=disposition))
            assert answer.status_code in (200, 400), answer.text
        assert on_disk(tmp_path) == await listed_file_ids(api)


REFUSED = {
    "a name with a line break": form(b"a\x0bb"),
    "a purpose that is half a surrogate": form(b"a", purpose=b"\xed\xa0\x80"),
    "a purpose of 10 KB": form(b"a", purpose=b"b" * 10_000),
    "no name of the field": form(b"a").replace(b'name="file"; ', b""),
    "another name": form(b"a").replace(b'name="file"', b'name="' + b"f" * 4000 + b'"'),
    "a name that is too long": form(b"a").replace(b'name="file"', b'name="' + b"f" * 100_000 + b'"'),
    "no disposition": form(b"a").replace(b"Content-Disposition: form-data;", b"X-Disposition: form-data;"),
    "two files": form(b"a")[: -len(b"--b--\r\n")] + form(b"a"),
    "a hundred fields": form(b"a", purpose=b'batch\r\n--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n' * 100),
    "cut off": form(b"a")[:-20],
    "headers without an end": form(b"a").replace(b"Content-Disposition", b"A: b\r\n" * 50_000 + b"Content-Disposition"),
    "nothing": b"",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_rejected_upload_form_leaves_no_file_on_disk(tmp_path: Path, name: str) -> None:
    async with keeping(tmp_path) as api:
        answer = await post(api, REFUSED[name])
        assert answer.status_code == 400, answer.text
        assert on_disk(tmp_path) == []


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; b=c"])
async def test_multipart_content_type_without_boundary_is_rejected(tmp_path: Path, kind: str) -> None:
    async with keeping(tmp_path) as api:
        assert (await post(api, form(b"a"), kind)).status_code == 400


async def test_upload_keeps_non_ascii_filenames(tmp_path: Path) -> None:
    async with keeping(tmp_path) as api:
        for name, expected in ((b"caf\xe9.jsonl", "café.jsonl"), ("日本.jsonl".encode(), "日本.jsonl"), (b"", "file")):
            kind = "multipart/form-data; boundary=b; charset=iso-8859-1"
            assert (await post(api, form(name), kind)).json()["filename"] == expected


async def test_upload_leaves_no_file_when_database_insert_fails(tmp_path: Path) -> None:
    """The database rejects the row, as it did for the name."""
    async with keeping(tmp_path) as api:
        with sqlite3.connect(tmp_path / "responses.sqlite3") as database:
            database.execute("create trigger no before insert on files begin select raise(abort, 'no'); end")
        answer = await post(api, form(b"a"))
        assert answer.status_code >= 500
        assert on_disk(tmp_path) == []
        with sqlite3.connect(tmp_path / "responses.sqlite3") as database:
            database.execute("drop trigger no")
        assert (await post(api, form(b"a"))).status_code == 200
        assert on_disk(tmp_path) == await listed_file_ids(api)


async def pieces(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), MIB):
        yield body[at : at + MIB]
        await asyncio.sleep(0)


@pytest.mark.parametrize("announced", [True, False])
async def test_concurrent_uploads_stay_below_max_stored_size(tmp_path: Path, announced: bool) -> None:
    """With a Content-Length, or in chunks."""
    async with keeping(tmp_path, max_stored_size=5 / 1024) as api:
        body = form(b"a", b"x" * 2 * MIB)
        headers = {"content-type": "multipart/form-data; boundary=b"}

        async def one() -> int:
            content = body if announced else pieces(body)
            return (await api.http.post("/v1/files", content=content, headers=headers)).status_code

        statuses = await asyncio.gather(*(one() for _ in range(8)))
        assert set(statuses) <= {200, 413}
        assert statuses.count(200) <= 2
        assert not announced or statuses.count(200) == 2
        assert sum(path.stat().st_size for path in (tmp_path / "files").iterdir()) <= 5 * MIB
        for id in await listed_file_ids(api):
            await api.openai.files.delete(id)
        assert [await one() for _ in range(3)] == [200, 200, 413], "room that nobody needs any more is there again"


def test_reserved_bytes_belong_to_process_until_exit(tmp_path: Path) -> None:
    data = open_data_dir(tmp_path, 10_000)
    remote = remote_data_dir(tmp_path, partial(serve_data_dir_call, data))
    assert remote.files.try_reserve_bytes("", "one", 6000, "0.1")
    assert not remote.files.try_reserve_bytes("", "two", 6000, "0.2")
    assert remote.files.try_reserve_bytes("", "one", 7000, "0.1"), "its own room is no other's"
    assert not remote.files.try_reserve_bytes("", "one", 12_000, "0.1")
    assert not remote.files.try_reserve_bytes("", "two", 3000, "0.2"), "a refusal gives nothing back"
    data.processes.remove_process("0.1")
    assert remote.files.try_reserve_bytes("", "two", 6000, "0.2")
    remote.files.release("two")
    assert remote.files.try_reserve_bytes("", "three", 9000, "0.1")
    remote.files.release("three")
    # A key that holds bytes gets more only while as much is left for others.
    assert data.files.try_reserve_bytes("a", "one", 4000, "0.1")
    assert not data.files.try_reserve_bytes("a", "two", 4000, "0.1")
    assert data.files.try_reserve_bytes("b", "two", 4000, "0.1")
    data.close()


def test_file_whose_reservation_was_lost_is_counted_again(tmp_path: Path) -> None:
    """The process that owns the data was replaced during the upload."""
    data = open_data_dir(tmp_path, 10_000)
    file = new_file("in.jsonl", "batch", 6000, keep_seconds=None)
    data.contents.write_content(file.id, BytesIO(b"x" * 6000))
    assert data.files.try_reserve_bytes(A, "other", 4500, "0.1")
    with pytest.raises(InvalidRequest, match="max-stored-size"):
        data.files.add(A, file)
    data.files.release("other")
    data.files.add(A, file)
    data.close()
