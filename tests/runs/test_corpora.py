import contextlib
import hashlib
import http.server
import io
import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from gptlite.errors import UserError
from gptlite.machine.folders import DATA_FOLDER
from gptlite.machine.shakespeare import SHA256, download_shakespeare
from gptlite.machine.text_files import read_text
from gptlite.runs.corpora import load_corpus


def unreachable(seconds):
    raise OSError("no route to host")


def test_a_file_is_taken_byte_for_byte(tmp_path):
    content = "one\r\ntwo\n\ttab é 🙂".encode()
    (tmp_path / "a.txt").write_bytes(content)
    corpus = load_corpus(str(tmp_path / "a.txt"))
    assert corpus.text.encode() == content
    assert corpus.version == hashlib.sha256(content).hexdigest()


def test_a_folder_is_its_txt_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "folder.txt").mkdir()
    for name, text in {"b.txt": "B", "a.txt": "A", "sub/c.TXT": "C", "no.md": "M"}.items():
        (tmp_path / name).write_text(text)
    assert load_corpus(str(tmp_path)).text == "A\nB\nC"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"ab\xff", "byte 2 is 0xff. If it is in another encoding, such as Latin-1, save it as"),
        ("ab".encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
        (None, "no corpus"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, content, words):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        load_corpus(str(path))


def test_a_folder_without_text_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no \.txt file"):
        load_corpus(str(tmp_path))


def test_shakespeare_is_downloaded_checked_and_kept(tmp_path, shakespeare):
    corpus = load_corpus(
        "shakespeare", data_folder=tmp_path / "data", download=lambda _: shakespeare.encode()
    )
    assert corpus.version == SHA256
    assert len(corpus.text) == 1_115_394
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["tinyshakespeare.txt"]
    assert load_corpus("auto", data_folder=tmp_path / "data", download=unreachable) == corpus


def test_what_is_not_shakespeare_is_neither_used_nor_kept(tmp_path):
    with pytest.raises(UserError, match="not TinyShakespeare"):
        load_corpus("shakespeare", data_folder=tmp_path, download=lambda _: b"To be or not")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "tinyshakespeare.txt").write_text("To be or not")
    with pytest.raises(UserError, match="sha256"):
        load_corpus("shakespeare", data_folder=tmp_path, download=unreachable)
    assert (tmp_path / "tinyshakespeare.txt").read_text() == "To be or not"


def test_offline_the_default_falls_back_and_says_so(tmp_path, capsys):
    corpus = load_corpus("auto", data_folder=tmp_path, download=unreachable)
    assert corpus.name == "pydoc"
    assert corpus == load_corpus("pydoc")
    assert len(corpus.text) > 300_000
    downloading, paragraph = capsys.readouterr().out.splitlines()
    assert "downloading" in downloading
    for words in ("no route to host", str(tmp_path / "tinyshakespeare.txt"), "pydoc"):
        assert words in paragraph


def test_a_corpus_named_explicitly_is_never_swapped(tmp_path):
    with pytest.raises(UserError, match="no route to host"):
        load_corpus("shakespeare", data_folder=tmp_path, download=unreachable)


@contextlib.contextmanager
def server(answer: Callable[[http.server.BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server on this machine that answers so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            with contextlib.suppress(OSError):  # the other side may have gone
                answer(self)

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        threading.Thread(target=found.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}/input.txt"
        found.shutdown()


def whole(handler):
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(b"To be,\r\nor not\nto be" * 10_000)


def silent(handler):
    time.sleep(2)


def trickling(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b"To be")
        handler.wfile.flush()
        time.sleep(0.05)


def missing(handler):
    handler.send_error(404)


def broken(handler):
    handler.wfile.write(b"nonsense\r\n\r\n")


def test_the_download_is_the_file():
    with server(whole) as url:
        assert download_shakespeare(60, url) == b"To be,\r\nor not\nto be" * 10_000


@pytest.mark.parametrize(
    ("answer", "seconds", "words"),
    [
        (silent, 0.1, "timed out"),
        (trickling, 0.3, r"not arrived within 0\.3 seconds"),
        (missing, 60, "404"),
        (broken, 60, "the HTTP response is invalid"),
    ],
)
def test_a_failed_download_says_why_in_one_line(answer, seconds, words):
    with server(answer) as url, pytest.raises(OSError, match=words) as error:
        download_shakespeare(seconds, url)
    assert "\n" not in str(error.value)


def test_a_proxy_that_has_no_address_is_told(monkeypatch):
    monkeypatch.setattr(urllib.request, "_opener", None)  # made anew, of the environment
    monkeypatch.setenv("http_proxy", "http:/proxy:3128")
    with pytest.raises(OSError, match="the request is invalid: proxy URL with no authority"):
        download_shakespeare(1, "http://gptlite.example/")


def test_the_deadline_is_ten_seconds():
    asked = []
    load_corpus(
        "auto",
        data_folder=DATA_FOLDER / "nowhere",
        download=lambda seconds: asked.append(seconds) or unreachable(seconds),
    )
    assert asked == [10.0]


def test_what_is_left_out_of_a_folder_is_told(tmp_path, monkeypatch, capsys):
    (tmp_path / "books").mkdir()
    (tmp_path / "books" / "b.txt").write_text("B")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("An A")
    (folder / "link").symlink_to(tmp_path / "books")
    assert load_corpus(str(folder)).text == "An A"
    assert f"{folder / 'link'} is left out: it is a link to a folder" in capsys.readouterr().out

    walk = os.walk

    def walk_and_fail(path, onerror):  # the tests may be root's, who may read all
        onerror(PermissionError(13, "Permission denied", f"{path}/lost+found"))
        return walk(path, onerror=onerror)

    monkeypatch.setattr(os, "walk", walk_and_fail)
    assert load_corpus(str(folder)).text == "An A"
    assert "folder/lost+found is left out: Permission denied" in capsys.readouterr().out


class Trickle(io.BytesIO):
    """As it comes over a network."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(1001, size or 0))


def test_pieces_do_not_depend_on_the_network():
    content = ("aé" * 2**20).encode()
    pieces = list(read_text(Trickle(content), "x"))
    assert pieces == list(read_text(io.BytesIO(content), "x"))
    assert len(pieces) == 4


def test_hidden_files_and_folders_are_left_out(tmp_path):
    """Jupyter keeps old copies of files in such a folder."""
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in ("a.txt", ".ipynb_checkpoints/a-checkpoint.txt", ".b.txt"):
        (tmp_path / name).write_text(f"the text of {name}")
    assert load_corpus(str(tmp_path)).text == "the text of a.txt"
    assert load_corpus(str(tmp_path / ".b.txt")).text == "the text of .b.txt"


def test_links_out_of_a_folder_are_told(tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "x.txt").write_text("outside")
    (folder / "a.txt").write_text("inside")
    (folder / "b.txt").symlink_to("a.txt")
    assert load_corpus(str(folder)).text == "inside\ninside"
    assert "link" not in capsys.readouterr().out
    for i in range(7):
        (folder / f"c{i}.txt").symlink_to(tmp_path / "x.txt")
    assert load_corpus(str(folder)).text == "\n".join(["inside"] * 2 + ["outside"] * 7)
    out = capsys.readouterr().out
    assert f"c0.txt is read, which is a link to {tmp_path / 'x.txt'}" in out
    assert "So it is with 2 more" in out


def test_a_link_that_leads_to_itself_is_no_text(tmp_path):
    (tmp_path / "a.txt").symlink_to("a.txt")
    with pytest.raises(UserError, match=r"a\.txt is not a regular file"):
        load_corpus(str(tmp_path))


def test_no_more_is_read_than_a_file_has(tmp_path):
    """Files in /proc have no size, and some wait for what comes next, for ever."""
    link = tmp_path / "x.txt"
    link.symlink_to("/proc/self/status")
    with pytest.raises(UserError, match="is empty"):
        load_corpus(str(tmp_path))


def test_a_home_folder_may_be_named_by_its_sign(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_text("at home")
    assert load_corpus("~/a.txt").text == "at home"
