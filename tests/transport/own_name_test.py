"""The name that a process goes by is known on its machine, and leads there."""

import socket
from unittest import mock

from absl.testing import absltest, parameterized

from hop_tf.errors import ClusterConfigError, DeadlineExceededError
from hop_tf.transport import own_name

_UNKNOWN = socket.gaierror(socket.EAI_NONAME, "Name or service not known")


class NamesTest(parameterized.TestCase):
    def check(self, known, addresses=("node1:7400", "node2:7400"), number=1, timeout_seconds=0.01):
        """Checks the name of a process, where these are known; returns those that were looked up."""
        asked = []

        def look_up(host, port, **_):
            asked.append(host)
            found = known[host]
            found = found.pop(0) if isinstance(found, list) else found
            if isinstance(found, Exception):
                raise found
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in found]

        with mock.patch.object(socket, "getaddrinfo", look_up), mock.patch.object(own_name, "_PAUSE_SECONDS", 0.001):
            own_name.check_own_name(addresses, number, timeout_seconds)
        return asked

    def test_a_name_that_others_reach(self):
        self.assertEqual(self.check({"node2": ("10.0.0.2",)}), ["node2"])

    @parameterized.parameters(("127.0.1.1",), ("::1",))
    def test_a_loopback_address_is_refused(self, address):
        known = {"node1": ("10.0.0.1",), "node2": (address,)}
        with self.assertRaisesRegex(ClusterConfigError, rf"as node1 does \(10.0.0.1\). Received: {address}, a loop"):
            self.check(known)

    def test_all_may_be_on_one_machine(self):
        self.check({"node1": ("127.0.0.1", "::1"), "node2": ("127.0.0.2",)})

    def test_loopback_addresses_that_are_meant_so(self):
        for own in ("localhost", "127.0.0.1"):
            self.check({"node1": ("10.0.0.1",), own: ("127.0.0.1",)}, ("node1:7400", f"{own}:7400"))

    def test_others_need_not_be_known_yet(self):
        self.check({"node1": _UNKNOWN, "node2": ("127.0.0.1",)})

    def test_others_are_looked_up_in_the_same_time(self):
        """With 0 seconds none of them is: no lookup begins after the deadline."""
        self.assertEqual(self.check({"node2": ("127.0.1.1",)}, timeout_seconds=0), ["node2"])

    @parameterized.parameters("a..b", "a" * 64)
    def test_what_is_no_name(self, host):
        with self.assertRaisesRegex(ClusterConfigError, f"1 to 63 characters. Received: '{host}'"):
            own_name.check_own_name([f"{host}:7400"], 0, 60.0)

    def test_another_name_is_none(self):
        known = {"a..b": UnicodeError("label empty or too long"), "node2": ("127.0.1.1",)}
        with self.assertRaisesRegex(ClusterConfigError, "1 to 63 characters. Received: 'a..b'"):
            self.check(known, ("a..b:7400", "node2:7400"))

    def test_one_of_several_addresses_is_no_loopback_one(self):
        self.check({"node2": ("127.0.1.1", "10.0.0.2")})

    def test_waits_for_the_name(self):
        asked = self.check({"node2": [_UNKNOWN, _UNKNOWN, ("10.0.0.2",)]}, timeout_seconds=60)
        self.assertEqual(asked, ["node2"] * 3)

    def test_the_name_stays_unknown(self):
        with self.assertRaisesRegex(
            DeadlineExceededError, "waited 0.01 s for .*, node2, to resolve.*: Name or service"
        ):
            self.check({"node2": _UNKNOWN})

    def test_numeric_addresses(self):
        own_name.check_own_name(["[::1]:7400", "127.0.0.1:7400"], 0, 1.0)


if __name__ == "__main__":
    absltest.main()
