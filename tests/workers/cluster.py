"""Start the processes of a `MultiWorkerMirroredStrategy` on this machine, and end them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path


class WorkerError(Exception):
    """A worker ended with an error, or not in time; the text holds what the workers printed."""


def run_workers(
    script: str,
    *arguments: str,
    workers: int = 2,
    timeout: float = 400,
    patience: float = 5,
) -> list[str]:
    """Run `script` in every worker; return what each printed. No process is left behind.

    As soon as one worker fails the others are given `patience` seconds, then killed: a worker
    that waits for a dead one may wait for ever.
    """
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(workers)]
    processes = []
    files = []  # a pipe that is full would stop a worker
    for index in range(workers):
        config = {
            "cluster": {"worker": addresses},
            "task": {"type": "worker", "index": index},
        }
        files.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        processes.append(
            subprocess.Popen(
                [sys.executable, str(Path(__file__).parent / script), *arguments],
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(config),
                    "TF_CPP_MIN_LOG_LEVEL": "3",
                },
                stdout=files[-1],
                stderr=subprocess.STDOUT,
            )
        )
    deadline = time.monotonic() + timeout
    failed = None
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                failed = failed or time.monotonic()
                deadline = min(deadline, failed + patience)
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
        outputs = []
        for process, file in zip(processes, files):
            process.wait()
            with file:
                file.seek(0)
                outputs.append(file.read())
    codes = [process.returncode for process in processes]
    if any(codes):
        raise WorkerError(f"exit codes {codes}\n" + "\n".join(o[-3000:] for o in outputs))
    return outputs


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
