"""Tests of the list of machines, and of what runs where."""

from __future__ import annotations

import json
import os
import shlex
import socket
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf.tools.processes import hosts, relay
from hop_tf.tools.processes.hosts import HostOptions
from hop_tf.tools.processes.local_cluster import Task, make_tasks


def _options(text, **arguments):
    return HostOptions(hosts=hosts.parse_hosts(text), **arguments)


def _commands(text, num_ps=0, **arguments):
    options = _options(text, **arguments)
    tasks = make_tasks(num_workers=options.num_workers, num_ps=num_ps)
    return hosts.host_commands(tasks, options, python="/py", script="s.py", arguments=["a b"], environment={"X": "1"})


class HostsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a.invalid", [("a.invalid", None, 1)]),
        ("a.invalid,b.invalid:4", [("a.invalid", None, 1), ("b.invalid", None, 4)]),
        ("me@a.invalid:2, 192.0.2.1", [("a.invalid", "me", 2), ("192.0.2.1", None, 1)]),
        ("[2001:db8::1]:3,[2001:db8::2]", [("[2001:db8::1]", None, 3), ("[2001:db8::2]", None, 1)]),
    )
    def test_reads(self, text, expected):
        found = hosts.parse_hosts(text)
        self.assertEqual([(host.name, host.user, host.num_workers) for host in found], expected)
        self.assertFalse(any(host.is_local for host in found))

    @parameterized.parameters("", "a,,b", "a:0", "a:x", "a:-1", "a b", "@a", "a@", "::1", "a:1:2", "[a]", "ssh://a")
    def test_refuses(self, text):
        with self.assertRaisesRegex(ValueError, "`hosts` must be names or addresses.*Received: hosts="):
            hosts.parse_hosts(text)

    @parameterized.parameters("a,a", "a:2,b,a:3", "me@a,you@a")
    def test_refuses_a_host_twice(self, text):
        with self.assertRaisesRegex(ValueError, "each host once"):
            hosts.parse_hosts(text)

    @parameterized.parameters("localhost", "LocalHost:2", socket.gethostname())
    def test_knows_this_machine(self, text):
        self.assertTrue(hosts.parse_hosts(text)[0].is_local)

    @parameterized.parameters("127.0.0.1", "[::1]:2", "127.0.0.2")
    def test_loopback_addresses_go_over_ssh(self, text):
        self.assertFalse(hosts.parse_hosts(text)[0].is_local)

    def test_others_must_reach_this_machine(self):
        with self.assertRaisesRegex(ValueError, "'localhost' is a loopback address here"):
            hosts.parse_hosts("localhost,a.invalid")

    @parameterized.parameters(({"first_port": 0}, "first_port=0"), ({"ssh": ()}, "`ssh` must be a command"))
    def test_refuses_options(self, arguments, message):
        with self.assertRaisesRegex(ValueError, message):
            _options("a", **arguments)

    def test_places(self):
        tasks = make_tasks(num_workers=4, num_ps=3)
        places = hosts.place_tasks(tasks, _options("a,b:2,c", first_port=5000))
        addresses = [address for _, address in places.values()]
        self.assertEqual(addresses, ["a:5000", "b:5000", "b:5001", "c:5000", "a:5001", "b:5002", "c:5001"])
        self.assertEqual([host.name for host, _ in places.values()], list("abbcabc"))

    def test_refuses_ports_that_are_too_large(self):
        tasks = make_tasks(num_workers=2, num_ps=1)
        with self.assertRaisesRegex(ValueError, "The ports of a.*first_port=65534, and more than 2 processes"):
            hosts.place_tasks(tasks, _options("a:2", first_port=65534))


class CommandsTest(absltest.TestCase):
    def test_on_this_machine(self):
        with mock.patch.dict(os.environ, {"MINE": "2", "CUDA_VISIBLE_DEVICES": "4,5"}):
            commands = _commands("localhost:2", num_ps=1)
        first, second = commands[Task("worker", 0)], commands[Task("worker", 1)]
        self.assertEqual(first.argv, ["/py", "s.py", "a b"])
        self.assertEqual((first.environment["MINE"], first.environment["X"]), ("2", "1"))
        self.assertEqual(json.loads(second.environment["TF_CONFIG"])["task"], {"type": "worker", "index": 1})
        gpus = [commands[task].environment["CUDA_VISIBLE_DEVICES"] for task in commands]
        self.assertEqual(gpus, ["4", "5", "-1"])

    def test_on_another_machine(self):
        with mock.patch.dict(os.environ, {"MINE": "2", "PYTHONPATH": f"/a b{os.pathsep}c"}):
            commands = _commands("a.invalid:2,me@b.invalid", num_ps=1, ssh=("ssh", "-p", "22"))
        command = commands[Task("worker", 1)]
        where = command.argv.index("ssh")
        self.assertEqual(command.argv[where : where + 3], ["ssh", "-p", "22"])
        self.assertEqual(command.argv[-2], "a.invalid")
        self.assertEqual(commands[Task("worker", 2)].argv[-2], "me@b.invalid")
        shell = shlex.split(command.argv[-1])
        self.assertEqual(shell[:3], ["exec", "sh", "-c"])
        self.assertIn(f"env PYTHONPATH='/a b:{os.getcwd()}/c' /py -P -m hop_tf.tools.processes.remote", shell[3])
        order = json.loads(command.environment[relay.ORDER_VARIABLE])
        self.assertEqual((order["script"], order["arguments"]), ("s.py", ["a b"]))
        self.assertEqual((order["num_workers"], order["index"], order["directory"]), (2, 1, os.getcwd()))
        self.assertEqual(order["environment"].keys(), {"X", "TF_CONFIG"})
        last = json.loads(commands[Task("worker", 2)].environment[relay.ORDER_VARIABLE])
        self.assertEqual((last["num_workers"], last["index"]), (1, 0))
        server = json.loads(commands[Task("ps", 0)].environment[relay.ORDER_VARIABLE])
        self.assertEqual((server["num_workers"], server["index"]), (2, None))

    def test_variables_are_no_part_of_the_command_line(self):
        options = _options("a.invalid")
        commands = hosts.host_commands(
            make_tasks(num_workers=1), options, python="p", script="s", arguments=[], environment={"T": "secret"}
        )
        self.assertNotIn("secret", " ".join(commands[Task("worker", 0)].argv))


if __name__ == "__main__":
    absltest.main()
