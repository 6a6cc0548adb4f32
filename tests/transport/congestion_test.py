"""The congestion control of connections to near and far peers."""

import pathlib
import socket
from unittest import mock

from absl.testing import absltest

from hop_tf.transport import connection

_AVAILABLE = pathlib.Path("/proc/sys/net/ipv4/tcp_available_congestion_control")


def _control(end):
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


class CongestionTest(absltest.TestCase):
    def setUp(self):
        super().setUp()
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.end = self.enterContext(socket.create_connection(server.getsockname()))
            self.enterContext(server.accept()[0])

    def fit(self, control):
        """Fits a connection that has this congestion control. Returns the control that it then has."""
        if control not in _AVAILABLE.read_text().split():
            self.skipTest(f"this system has no {control}")
        self.end.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        connection.Connection(self.end).fit_congestion_control()
        return _control(self.end)

    @mock.patch.object(connection, "_NEAR_SECONDS", 60.0)  # On a busy machine the first round trip takes milliseconds.
    def test_a_near_peer_gets_cubic_in_the_place_of_bbr(self):
        self.assertEqual(self.fit("bbr"), "cubic")

    @mock.patch.object(connection, "_NEAR_SECONDS", 0.0)
    def test_a_far_peer_keeps_bbr(self):
        self.assertEqual(self.fit("bbr"), "bbr")

    def test_what_an_administrator_has_chosen_is_kept_but_for_bbr(self):
        self.assertEqual(self.fit("reno"), "reno")

    def test_a_system_that_refuses_is_left_as_it_is(self):
        refusing = mock.create_autospec(socket.socket, instance=True)
        refusing.getsockopt.side_effect = OSError("not here")
        connection.Connection(refusing).fit_congestion_control()
        self.assertEqual(refusing.getsockopt.call_args_list[0].args[:2], (socket.IPPROTO_TCP, socket.TCP_CONGESTION))


if __name__ == "__main__":
    absltest.main()
