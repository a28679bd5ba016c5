"""A Spark driver that follows, round after round, when it is told to. ``test_racing_drivers.py`` runs two at once."""

from __future__ import annotations

import sys

import strandline as sl
from strandline.errors import Fenced
from tests.spark.helpers import quick_session


def main(folder: str, rounds: int) -> None:
    spark = quick_session("racer", cores=1, memory="1g")
    for number in range(rounds):
        print("ready", flush=True)
        sys.stdin.readline()
        print(_follow(spark, folder, number), flush=True)
    spark.stop()


def _follow(spark, folder: str, number: int) -> str:
    sink = sl.DeltaSink(f"{folder}/table-{number}", mode="append" if number % 2 else "latest")
    slot = "s" if number % 4 > 1 else None
    options = {"maxBatchesPerTrigger": "2"}

    try:
        following = sl.spark.follow(
            spark,
            f"{folder}/log-{number}",
            sink,
            slot=slot,
            trigger={"availableNow": True},
            options=options,
            place="executors" if number % 3 else "driver",
        )
        assert following.await_termination(600), "it goes on and on"
    except Fenced:
        return "Fenced"
    except Exception as error:  # noqa: BLE001 - the parent judges it
        return f"{type(error).__name__}: {error}".replace("\n", " ")[:1000]
    return "ok"


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
