"""A Hive metastore on loopback, by the jars that Spark brings along: nothing is downloaded for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from xml.sax.saxutils import escape

from tests.servers import HOME, NoServer, Process

_OPENED = ("java.lang", "java.lang.reflect", "java.net", "java.nio", "java.util", "java.util.concurrent")
_LOCKS = """
CREATE TABLE NEXT_LOCK_ID (NL_NEXT BIGINT NOT NULL);
INSERT INTO NEXT_LOCK_ID VALUES (1);
CREATE TABLE AUX_TABLE (
  MT_KEY1 VARCHAR(128) NOT NULL, MT_KEY2 BIGINT NOT NULL, MT_COMMENT VARCHAR(255), PRIMARY KEY (MT_KEY1, MT_KEY2));
CREATE TABLE HIVE_LOCKS (
  HL_LOCK_EXT_ID BIGINT NOT NULL, HL_LOCK_INT_ID BIGINT NOT NULL, HL_TXNID BIGINT, HL_DB VARCHAR(128) NOT NULL,
  HL_TABLE VARCHAR(128), HL_PARTITION VARCHAR(767), HL_LOCK_STATE CHAR(1) NOT NULL, HL_LOCK_TYPE CHAR(1) NOT NULL,
  HL_LAST_HEARTBEAT BIGINT NOT NULL, HL_ACQUIRED_AT BIGINT, HL_USER VARCHAR(128) NOT NULL,
  HL_HOST VARCHAR(128) NOT NULL, HL_HEARTBEAT_COUNT INTEGER, HL_AGENT_INFO VARCHAR(128),
  HL_BLOCKEDBY_EXT_ID BIGINT, HL_BLOCKEDBY_INT_ID BIGINT, PRIMARY KEY (HL_LOCK_EXT_ID, HL_LOCK_INT_ID));
"""
"""The tables of locks, which the metastore creates by itself only in a mode for its own tests."""


class HiveServer(Process):
    """The metastore, which keeps its tables in a Derby database in its folder."""

    name = "hive"
    grace = 10.0

    def program(self) -> Path:
        """Java; ``NoServer`` without Spark or Java."""
        try:
            import pyspark
        except ImportError as error:
            raise NoServer("no server: Spark brings the Hive metastore, run 'make venv'") from error
        self._jars = Path(pyspark.__file__).parent / "jars"
        if not any(self._jars.glob("hive-metastore-*.jar")):
            raise NoServer("no server: this Spark brings no Hive metastore")
        home = os.environ.get("JAVA_HOME")
        if home is None:
            found = subprocess.run([HOME.parent / "scripts" / "java.sh"], capture_output=True, text=True, check=False)
            if found.returncode:
                raise NoServer("no server: the Hive metastore needs Java")
            home = found.stdout.strip()
        return Path(home, "bin", "java")

    def prepare(self) -> None:
        """Its settings, and the tables of its locks."""
        database = f"jdbc:derby:;databaseName={self.folder}/metastore;create=true"
        settings = {
            "javax.jdo.option.ConnectionURL": database,
            "datanucleus.schema.autoCreateAll": "true",
            "datanucleus.connectionPoolingType": "none",
            "hive.metastore.schema.verification": "false",
            "hive.metastore.warehouse.dir": f"{self.folder}/warehouse",
            "hive.metastore.server.min.threads": "2",
            "hive.async.log.enabled": "false",  # Spark lacks what it needs
            "hive.txn.timeout": "3600s",
        }
        listed = "".join(
            f"<property><name>{name}</name><value>{escape(value)}</value></property>"
            for name, value in settings.items()
        )
        folder = Path(self.folder, "conf")
        folder.mkdir()
        (folder / "hive-site.xml").write_text(f"<configuration>{listed}</configuration>")
        logging = ("appender.out.type = Console", "appender.out.name = out", "rootLogger.level = warn")
        lines = (*logging, "rootLogger.appenderRef.out.ref = out", "")
        (folder / "hive-log4j2.properties").write_text("\n".join(lines))
        script = Path(self.folder, "locks.sql")
        script.write_text(f"connect '{database}';{_LOCKS}exit;\n")
        subprocess.run(
            [str(self.program()), *self._java(), "org.apache.derby.tools.ij", str(script)],
            cwd=self.folder,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def _java(self) -> list[str]:
        opened = [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED]
        light = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"]
        return [*light, *opened, f"-Djava.io.tmpdir={self.folder}", "-cp", f"{self.folder}/conf:{self._jars}/*"]

    def command(self) -> list[str]:
        """The metastore on the port."""
        return [*self._java(), "org.apache.hadoop.hive.metastore.HiveMetaStore", "-p", str(self.port)]

    @property
    def uri(self) -> str:
        """What a client connects to."""
        return f"thrift://127.0.0.1:{self.port}"
