"""A standalone Spark cluster of real processes: a master, workers that share no folder, and a Connect server."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self
from uuid import uuid4

import psutil
import pyspark

from strandline.spark.session import find_java

HOME = Path(pyspark.__file__).parent
_PATIENCE = 300.0
_QUICK = "-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto"


class Cluster:
    """One master and two workers on loopback, each with its own working directory and its own local folders."""

    def __init__(
        self,
        folder: Path,
        *,
        has_package: bool = True,
        hosts: tuple[str, str] = ("127.0.0.1", "127.0.0.1"),
        cores: int = 2,
    ) -> None:
        """``has_package``: whether the Python of its machines has this package. Each worker has a host and cores."""
        self._folder = folder
        self._hosts = hosts
        self._cores = str(cores)
        path = os.environ.get("PYTHONPATH", "")
        self._python = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": path} if has_package else {}
        self._stack = ExitStack()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.master = ""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._stack = stack
            ports = ["--port", "0", "--webui-port", "0"]
            self._start_master("0")
            for name, host in zip(("worker-1", "worker-2"), self._hosts, strict=True):
                worker = ["bin/spark-class", "org.apache.spark.deploy.worker.Worker", "--host", host, *ports]
                size = ["--cores", self._cores, "--memory", "1g", "--work-dir", str(self._folder / name / "work")]
                self.started(name, [*worker, *size, self.master], "Successfully registered with master")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start_master(self, port: str) -> None:
        place = ["--host", "127.0.0.1", "--port", port, "--webui-port", "0"]
        command = ["bin/spark-class", "org.apache.spark.deploy.master.Master", *place]
        self.master = self.started("master", command, r"Starting Spark master at (spark://\S+)")

    def restart_master(self) -> None:
        """Kill the master, and start it again at its address; it recovers its workers and applications."""
        process = self._processes["master"]
        process.kill()
        process.wait()
        self._start_master(self.master.rpartition(":")[2])

    def family(self) -> list[psutil.Process]:
        """All processes that the cluster runs now."""
        return [child for one in self._processes.values() for child in _children(one.pid)]

    def environment(self, name: str) -> dict[str, str]:
        """The variables of one process: nothing of this one's but where programs are. No credentials."""
        folder = self._folder / name
        (folder / "local").mkdir(parents=True, exist_ok=True)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "JAVA_HOME": str(Path(find_java()).parents[1]),
            "SPARK_HOME": str(HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(folder / "local"),
            "SPARK_PID_DIR": str(folder),
            "SPARK_LOG_DIR": str(folder),
            "SPARK_DAEMON_MEMORY": "512m",
            # A worker that a busy machine silences for a minute would lose its executors.
            "SPARK_DAEMON_JAVA_OPTS": f"{_QUICK} -Dspark.worker.timeout=600 "
            # A master that was restarted waits for a driver that was killed meanwhile.
            "-Dspark.deploy.recoveryMode=FILESYSTEM -Dspark.deploy.recoveryTimeout=10 "
            f"-Dspark.deploy.recoveryDirectory={self._folder}/recovery",
            "PYTHONDONTWRITEBYTECODE": "1",
            **self._python,
        }

    def started(self, name: str, command: Sequence[str], ready: str) -> str:
        """Start a process in a folder of its own; what its output says when it is ready. It ends with the cluster."""
        environment = self.environment(name)
        out = self._folder / name / "output.txt"
        program = [str(HOME / command[0]), *command[1:]]
        with out.open("wb") as file:
            process = subprocess.Popen(program, cwd=out.parent, env=environment, stdout=file, stderr=file)
        self._stack.callback(_end, process)
        self._processes[name] = process
        limit = time.monotonic() + _PATIENCE
        while True:
            found = re.search(ready, out.read_text(errors="replace"))
            if found:
                return found[found.lastindex or 0]
            assert process.poll() is None, out.read_text(errors="replace")[-3000:]
            assert time.monotonic() < limit, out.read_text(errors="replace")[-3000:]
            time.sleep(0.1)

    def run(self, program: Sequence[str], given: object = None, *, limit: float = 1500) -> str:
        """The output of a Python program in a folder of its own, which gets ``given`` as JSON."""
        environment = self.environment(f"driver-{uuid4()}")
        done = subprocess.run(
            [sys.executable, *program],
            input=json.dumps(given),
            cwd=environment["HOME"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
        return done.stdout

    def settings(self) -> dict[str, str]:
        """Settings of an application that has both workers."""
        return {
            "spark.master": self.master,
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "1g",
            "spark.executor.memory": "512m",
            "spark.executor.cores": "1",
            "spark.cores.max": "2",
            "spark.deploy.spreadOutApps": "true",
            "spark.sql.shuffle.partitions": "2",
            "spark.executor.extraJavaOptions": _QUICK,
            "spark.driver.extraJavaOptions": _QUICK,
            "spark.ui.showConsoleProgress": "false",
        }

    def connect(self, port: int, ui: int) -> str:
        """Start a Connect server as the cluster's driver; its address for clients."""
        more = {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}
        conf = {**self.settings(), **more, "spark.ui.port": str(ui)}
        given = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
        # Not by sbin/start-connect-server.sh, which the package of Spark 4.2 lacks.
        server = "org.apache.spark.sql.connect.service.SparkConnectServer"
        self.started("connect", ["bin/spark-submit", "--class", server, *given], "Spark Connect server started at")
        return f"sc://127.0.0.1:{port}"


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def executor_of(worker: int) -> psutil.Process:
    """The executor JVM that runs a Python worker."""
    for parent in psutil.Process(worker).parents():
        if any("CoarseGrainedExecutorBackend" in word for word in parent.cmdline()):
            return parent
    raise AssertionError(f"process {worker} is no Python worker of an executor")


@contextmanager
def executor_killer(limit: float = 600) -> Iterator[tuple[int, dict[str, int]]]:
    """A port at which tasks name their process and their job: the executor of each job's first one is killed there.

    All others are answered and go on. Also what was killed: the executor's process by job.
    """
    killed: dict[str, int] = {}
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(limit)

        def serve() -> None:
            while not done.is_set():
                try:
                    line, _ = server.accept()
                except OSError:
                    return
                with line:
                    pid, _, job = line.recv(64).decode().strip().partition(" ")
                    if pid and job not in killed:
                        executor = executor_of(int(pid))
                        killed[job] = executor.pid
                        executor.kill()
                        executor.wait(60)
                    elif pid:
                        line.sendall(b"1")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], killed
        done.set()
    thread.join(10)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it started: executors outlive a killed worker."""
    family = _children(process.pid)
    process.terminate()
    for one in family:
        with ExitStack() as stack:
            stack.push(lambda kind, *_: kind is psutil.NoSuchProcess)
            one.kill()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
