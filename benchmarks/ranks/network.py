"""Hosts joined by a limited network, on one machine: a network namespace each, and a switch, with `tc` limits.

    python benchmarks/ranks/network.py --hosts 2 --rate 400mbit -- benchmarks/ranks/gathering.py machine.toml

runs the script as a job of one rank a host. Every host has one link to the switch, which carries so many bits a second
each way, whoever they go to. All of it is in namespaces of this command's own (``unshare``), which the kernel removes
with its last process, however that ends; no rights are needed where users may make namespaces. The wire has no delay
but its queue's, as not every kernel has ``netem``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

_PRIVATE = ("unshare", "--map-root-user", "--net", "--mount", "--")
#: Set where this process is in namespaces of its own.
_INSIDE = "RANKS_NETWORK"
_ADDRESS, _PORT = "10.77.0.{}", 29500
#: Bytes that a link may send at once, and that wait for their turn.
_BURST, _QUEUE = "256kb", "16mb"


def _do(command: str) -> None:
    subprocess.run(shlex.split(command), check=True)


def join_hosts(hosts: int, rate: str) -> None:
    """Make the hosts ``host0``, ``host1``, ... and the switch that joins them.

    Args:
        rate: Rate of a link, each way, in the words of tc ("400mbit").
    """
    _do("mount -t tmpfs none /run")  # where namespaces have their names
    _do("ip link add switch type bridge")
    _do("ip link set switch up")
    for host in range(hosts):
        _do(f"ip netns add host{host}")
        _do(f"ip link add port{host} type veth peer name wire netns host{host}")
        _do(f"ip link set port{host} master switch up")
        _do(f"ip -n host{host} addr add {_ADDRESS.format(host + 1)}/24 dev wire")
        _do(f"ip -n host{host} link set wire up")
        _do(f"ip -n host{host} link set lo up")
        limit = f"root tbf rate {rate} burst {_BURST} limit {_QUEUE}"
        _do(f"tc qdisc add dev port{host} {limit}")
        _do(f"tc -n host{host} qdisc add dev wire {limit}")


def run_job(hosts: int, command: Sequence[str]) -> int:
    """Run a Python command as a job of one rank on each host; returns the first exit status that is not 0."""
    job = {"WORLD_SIZE": str(hosts), "MASTER_ADDR": _ADDRESS.format(1), "MASTER_PORT": str(_PORT)}
    job |= {"LOCAL_WORLD_SIZE": str(hosts), "GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1"}  # of one machine
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", f"host{rank}", sys.executable, *command],
            env={**os.environ, **job, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(hosts)
    ]
    status = 0
    while any(rank.poll() is None for rank in ranks):
        status = next((code for rank in ranks if (code := rank.poll())), 0)
        if status:  # the others would wait for it
            for rank in ranks:
                rank.terminate()
        time.sleep(0.1)
    return status or next((rank.returncode for rank in ranks if rank.returncode), 0)


def main() -> int:
    """Make the network, run the job in it, and leave nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="400mbit", help="of each link, in the words of tc")
    parser.add_argument("command", nargs="+", help='what Python runs on each host, behind "--"')
    args = parser.parse_args()
    if _INSIDE not in os.environ:
        os.execvpe("unshare", [*_PRIVATE, sys.executable, *sys.argv], {**os.environ, _INSIDE: "1"})
    join_hosts(args.hosts, args.rate)
    return run_job(args.hosts, args.command)


if __name__ == "__main__":
    sys.exit(main())
