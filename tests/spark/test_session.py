"""Starting a local session: what is missing is said in one sentence, and the class archive is only ever a gift."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strandline.model.errors import MissingExtra
from strandline.spark import session


def test_without_pyspark_the_extra_is_named():
    program = "import sys; sys.modules['pyspark'] = None; import strandline as sl; sl.spark.follow"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "strandline.model.errors.MissingExtra: Spark needs the extra 'spark': pip install 'strandline[spark]'."
    )


@pytest.mark.parametrize("home", [True, False])
def test_without_java_the_sentence_says_where_it_was_looked_for(monkeypatch, tmp_path, home):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    if home:
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MissingExtra, match="JAVA_HOME" if home else "on the PATH"):
        session.find_java()


def test_java_is_found_on_the_path(monkeypatch, tmp_path):
    java = tmp_path / "java"
    java.touch(mode=0o755)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'nothing'}:{tmp_path}")
    assert session.find_java() == str(java)


def archive(cache: Path) -> tuple[str, Path]:
    options = session._archive_options("/usr/bin/java", session.DISK)
    return options, cache / "strandline" / f"spark-{session.pyspark_version}-usr-bin-java.jsa"


def test_the_archive_is_made_once_and_used_when_it_is_whole(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options, file = archive(tmp_path)
    assert f"-XX:ArchiveClassesAtExit={file}" in options
    file.write_bytes(b"\x00" * 4096)  # a JVM was killed while it wrote: the head comes last
    assert "ArchiveClassesAtExit" in archive(tmp_path)[0]
    file.write_bytes(b"\xa8\xab\x0b\xf0" + b"\x00" * 4096)
    assert f"-XX:SharedArchiveFile={file}" in archive(tmp_path)[0]


def test_without_a_writable_cache_the_session_just_starts_more_slowly(monkeypatch, tmp_path):
    (tmp_path / "strandline").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert archive(tmp_path)[0] == ""


def test_a_cache_with_a_space_in_its_name_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert archive(tmp_path)[0] == ""


def test_the_session_listens_on_the_loopback_address_only_and_workers_run_this_python(spark):
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.driver.host") == conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.sparkContext.pythonExec == sys.executable


def test_a_second_call_gives_the_same_session(spark):
    assert session.local_session("another") is spark
