"""``torchrun ... -m dpbam train``: on one host, and on two that are network namespaces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from end_to_end.test_kill_resume import entries, outcome
from tests.forked import command
from together import AGENT, open_store

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TRAIN = ["-m", "dpbam", "train", "--data", "digits", "--model", "mlp", "--method", "dp-sat",
         "--lr", "0.02", "--noise-multiplier", "4", "--delta", "1e-4", "--accountant", "rdp",
         "--batch-size", "180", "--epochs", "4", "--eval-every", "1", "--device", "cpu",
         "--augment-multiplicity", "8", "--physical-batch-size", "64", "--seed", "5"]  # fmt: skip
STEPS, TIMEOUT, LIMIT = 32, 30, 600  # LIMIT: what ranks wait for one another by default
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(*args: object, cwd: Path, prefix: tuple[str, ...] = (), **environment: str):
    """Started, not waited for."""
    return subprocess.Popen(
        [*prefix, *TORCHRUN, *map(str, args)], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**ENVIRONMENT, **environment}, start_new_session=True,
    )  # fmt: skip


def on_one_host(*args: object, cwd: Path) -> subprocess.Popen[str]:
    return torchrun("--standalone", "--nproc-per-node", 2, *args, cwd=cwd)


@contextmanager
def ended(process: subprocess.Popen[str]):
    """Whatever happens, the processes are gone afterwards."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # which torchrun passes on to its workers
            process.wait(LIMIT)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What two ranks on one host give, and what they print."""
    place = tmp_path_factory.mktemp("undisturbed")
    with ended(on_one_host(*TRAIN, "--out", "run", cwd=place)) as process:
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    return outcome(place / "run"), stdout, stderr


def launched(rank: int, port: int) -> None:
    """Be a rank of two, as torchrun starts it."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **AGENT,
    }  # fmt: skip


@pytest.fixture
def forked(tmp_path):
    """What two ranks give and print that are forked, without torchrun."""
    store, said = open_store(), [[tmp_path / f"{k}.out", tmp_path / f"{k}.err"] for k in (0, 1)]
    ranks = [
        command(
            *TRAIN[2:], "--epochs", "1", "--augment-multiplicity", "2", "--out", "run",
            cwd=tmp_path, stdout=out, stderr=err, first=partial(launched, rank, store.port),
        )
        for rank, (out, err) in enumerate(said)
    ]  # fmt: skip
    for rank in ranks:
        rank.join()
    stdout, stderr = ("".join(p.read_text() for p in paths) for paths in zip(*said, strict=True))
    assert [rank.exitcode for rank in ranks] == [0, 0], stderr
    return outcome(tmp_path / "run"), stdout, stderr


@pytest.mark.parametrize(
    ("of", "steps"),
    [("forked", STEPS // 4), ("undisturbed", STEPS)],
)
@pytest.mark.slow
def test_two_ranks_are_one_run(of, steps, request):
    """One ledger, one statement, one voice."""
    result, stdout, stderr = request.getfixturevalue(of)
    assert result["steps"] == (steps, steps)
    assert len(result["ledger"]) == steps
    assert stdout.count("complete") == 1
    assert stderr.count(f"{steps} steps of 180 of 1438 records") == 1


@contextmanager
def two_hosts():
    """Two network namespaces with a cable between them; 10.77.0.1 and 10.77.0.2."""
    if shutil.which("ip") is None:
        pytest.skip("no command ip: make test-deps")
    if os.geteuid():
        pytest.skip("network namespaces are for root: run the tests as root")
    names = [f"dpbam{os.getpid()}{side}" for side in "ab"]
    with ExitStack() as cleanup:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode:
                pytest.skip("this system allows no network namespaces: run the tests on another")
            cleanup.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
        ip("link", "add", "va", "netns", names[0], "type", "veth", "peer", "vb", "netns", names[1])
        for number, (name, cable) in enumerate(zip(names, ("va", "vb"), strict=True), 1):
            ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names


def ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def node(number: int, host: str, cwd: Path) -> subprocess.Popen[str]:
    """One torchrun of two, with one rank, on a host of its own."""
    return torchrun(
        "--nnodes", 2, "--node-rank", number, "--nproc-per-node", 1, "--master-addr", "10.77.0.1",
        "--master-port", 29577, *TRAIN, "--checkpoint-every", 0, "--out", "run", cwd=cwd,
        prefix=("ip", "netns", "exec", host), GLOO_SOCKET_IFNAME=("va", "vb")[number],
        DPBAM_RANK_TIMEOUT=str(TIMEOUT),
    )  # fmt: skip


def wait_for_steps(out: Path, count: int, *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LIMIT
    while len(entries(out)) < count:
        assert time.monotonic() < deadline, "no step was taken"
        assert all(p.poll() is None for p in processes), [p.communicate() for p in processes]
        time.sleep(0.02)


def messages(process: subprocess.Popen[str]) -> list[str]:
    """The errors that dpbam itself prints."""
    _, stderr = process.communicate(timeout=LIMIT)
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
def test_a_host_that_is_cut_off_ends_both_sides_and_the_run_goes_on(undisturbed, tmp_path):
    out = tmp_path / "run"
    with two_hosts() as hosts, ExitStack() as stack:
        a, b = (stack.enter_context(ended(node(k, hosts[k], tmp_path))) for k in (0, 1))
        wait_for_steps(out, 3, a, b)
        ip("-n", hosts[1], "link", "set", "vb", "down")  # the cable is pulled, nobody is told
        (said_a,), (said_b,) = messages(a), messages(b)  # long before the default time-out
    assert a.returncode != 0
    assert b.returncode != 0
    assert said_a.startswith("error: rank 1 (on ")
    assert "lost" in said_a
    assert "does not answer" in said_b
    assert 3 <= len(entries(out)) < STEPS
    with ended(on_one_host("-m", "dpbam", "train", "--resume", "--out", "run", cwd=tmp_path)) as p:
        _, stderr = p.communicate(timeout=LIMIT)
    assert p.returncode == 0, stderr
    assert outcome(out) == undisturbed[0]
    statement = json.loads((out / "privacy-statement.json").read_text())
    assert statement["charged_steps"] == STEPS
