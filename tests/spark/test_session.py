"""Starting a local session: what is missing is said in one sentence, and the class archive is only ever a gift."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import strandline as sl
from strandline.errors import MissingExtra
from strandline.spark import session
from tests.matrix_cases import some


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
    options = session._archive_options("/usr/bin/java", session.SYSTEM.disk)
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
    assert session._archive_options("/usr/bin/java", session.SYSTEM.disk) == ""


def test_a_cache_with_a_space_in_its_name_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "my cache"))
    assert session._archive_options("/usr/bin/java", session.SYSTEM.disk) == ""


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


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("options", "says"),
    some(
        [
            (["--master", "nonsense"], "No session on nonsense: Master must either be yarn or start with"),
            (["--master", "local[x]"], "Could not parse Master URL: 'local[x]'"),
            (["--conf", "spark.driver.memory=much"], "Invalid maximum heap size: -Xmxmuch"),
            (["--remote", "sc://127.0.0.1:1/;token=secret"], "127.0.0.1:1 cannot be reached (Connection refused)"),
            (["--master", "spark://127.0.0.1:1"], "127.0.0.1:1 cannot be reached (Connection refused)"),
            (["--remote", "nonsense;token=secret"], "The URL must start with 'sc://'"),
        ],
        1,
    ),
)
def test_a_cluster_that_cannot_be_used_is_one_sentence_without_a_trace_of_java(tmp_path, options, says):
    words = ["spark", *options, "verify", str(tmp_path)]
    sl.open(tmp_path, create=True)
    done = subprocess.run(
        [sys.executable, "-m", "strandline.cli", *words], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert "secret" not in done.stderr


@pytest.mark.matrix
def test_what_every_start_of_spark_prints_is_left_out_and_the_rest_is_passed_on():
    program = """if True:
        import os
        from strandline.cli.shared.spark_session import _held_back
        with _held_back() as relay:
            os.write(2, b"WARNING: Using incubator modules: jdk.incubator.x\\nSetting default log level to\\nlow on")
            os.write(2, b" disk\\n")
            while "disk" not in relay.printed():
                pass
        os.write(2, b"later\\n")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == "low on disk\nlater\n"


@pytest.mark.matrix
def test_what_workers_print_while_the_session_stops_is_dropped():
    program = """if True:
        import subprocess
        from strandline.cli.shared.spark_session import _held_back
        with _held_back() as relay:
            child = subprocess.Popen(["sh", "-c", "read line; echo Broken pipe >&2"], stdin=subprocess.PIPE)
        relay.drop()
        child.communicate(b"stop\\n")
        while "Broken pipe" not in relay.printed():
            pass
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stderr == ""


@pytest.mark.matrix
def test_what_the_jvm_prints_after_its_start_reaches_standard_error(tmp_path):
    program = """if True:
        import os, subprocess
        from strandline.cli.shared.spark_session import _held_back
        with _held_back() as relay:
            child = subprocess.Popen(["sh", "-c", "echo first >&2; read line; echo second >&2"], stdin=subprocess.PIPE)
            while "first" not in relay.printed():
                pass
        child.communicate(b"go on\\n")
        os.write(2, b"third\\n")
        while True:
            pass
    """
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        seen = {process.stderr.readline() for _ in range(3)}
        process.kill()
    assert seen == {"first\n", "second\n", "third\n"}
