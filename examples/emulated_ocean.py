"""Starts a script on two hosts of this machine, over an emulated ocean: a long delay, and a narrow link.

    python examples/emulated_ocean.py examples/two_sites.py
    python examples/emulated_ocean.py --round_trip_seconds=0.5 --megabits=10 examples/two_sites.py --epochs=10

The hosts are network namespaces, which need Linux and root. Nothing outside of them changes, and the script removes
them at the end. For several machines, which have real links, see docs/launch.md.
"""

import argparse
import json
import os
import sys

from hop_tf.tools.testing import network

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--round_trip_seconds", type=float, default=0.2, help="time of a message and its answer")
parser.add_argument("--megabits", type=float, default=100, help="rate of each host's link, in Mbit/s")
parser.add_argument("command", nargs=argparse.REMAINDER, help="the script and its arguments")
args = parser.parse_args()
if not args.command:
    parser.error("a script is needed, such as examples/two_sites.py")

links = {"round_trip_seconds": args.round_trip_seconds, "bandwidth_bits_per_second": args.megabits * 1e6}
with network.EmulatedNetwork(2, **links) as ocean:
    workers = [f"{address}:2222" for address in ocean.addresses]
    ranks = []
    for rank in range(2):
        config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        ranks.append(ocean.popen(rank, [sys.executable, *args.command], env=environment))
    exit_codes = [process.wait() for process in ranks]  # If one fails, the other one notices, and ends.
sys.exit(any(exit_codes))
