"""Starting a local session: what is missing is said in one sentence, and the class archive is only ever a gift."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from strandline.errors import MissingExtra
from strandline.spark import session


def test_without_pyspark_the_extra_is_named():
    program = "import sys; sys.modules['pyspark'] = None; import strandline as sl; sl.spark.follow"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[-1] == (
        "strandline.errors.MissingExtra: Spark needs the extra 'spark': pip install 'strandline[spark]'."
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


HEAD = b"\xa8\xab\x0b\xf0"
"""How an archive begins that was written to its end."""


@pytest.fixture
def jars(monkeypatch, tmp_path) -> Path:
    """The folder of an installation of Spark, with one jar."""
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "spark.jar").write_bytes(b"classes")
    return jars


def archive() -> tuple[str, Path]:
    """What the JVM is told to do with which archive: to make it when it exits, or to use it."""
    options = session._archive_options("/usr/bin/java", session.DISK)
    what, _, file = options.split()[-1].removeprefix("-XX:").partition("=")
    return what, Path(file)


def test_the_archive_is_made_once_and_used_when_it_is_whole(jars):
    what, file = archive()
    assert what == "ArchiveClassesAtExit"
    file.write_bytes(b"\x00" * 4096)  # a JVM was killed while it wrote: the head comes last
    assert archive() == ("ArchiveClassesAtExit", file)
    file.write_bytes(HEAD + b"\x00" * 4096)
    assert archive() == ("SharedArchiveFile", file)


def test_the_archive_is_made_again_after_spark_was_installed_again_and_the_old_one_is_removed(jars):
    old = archive()[1]
    old.write_bytes(HEAD)
    os.utime(jars / "spark.jar", ns=(0, 0))  # the JVM compares this too, and would ignore the archive for ever
    what, new = archive()
    assert (what, new == old, old.exists()) == ("ArchiveClassesAtExit", False, False)
    new.write_bytes(HEAD)
    assert archive() == ("SharedArchiveFile", new)


def test_two_installations_of_spark_have_an_archive_each(jars, monkeypatch, tmp_path):
    first = archive()[1]
    first.write_bytes(HEAD)
    shutil.copytree(jars, tmp_path / "other" / "jars")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "other"))
    what, second = archive()
    assert (what, second == first, first.exists()) == ("ArchiveClassesAtExit", False, True)


def test_without_a_writable_cache_the_session_just_starts_more_slowly(monkeypatch, tmp_path):
    (tmp_path / "strandline").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert session._archive_options("/usr/bin/java", session.DISK) == ""


def test_a_cache_with_a_space_in_its_name_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert session._archive_options("/usr/bin/java", session.DISK) == ""


def test_the_session_listens_on_the_loopback_address_only_and_workers_run_this_python(spark):
    conf = spark.sparkContext.getConf()
    assert conf.get("spark.driver.host") == conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert spark.sparkContext.pythonExec == sys.executable


def test_a_second_call_gives_the_same_session(spark):
    assert session.local_session("another") is spark


def test_the_client_of_spark_connect_needs_neither_py4j_nor_a_jvm() -> None:
    names = "follow, executors, rebuild, start, listen, read, StrandlineDataSource"
    program = f"""
import sys
sys.modules["py4j"] = sys.modules["pyspark.core"] = None  # as in pyspark-client
import strandline as sl
print([name for name in "{names}".split(", ") if getattr(sl.spark, name) is None])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
