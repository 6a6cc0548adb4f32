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

    def may_choose(self, control):
        """Returns False if the system does not allow a control to this process, as without privileges."""
        with socket.socket() as other:
            try:
                other.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
            except OSError:
                return False
        return True

    @mock.patch.object(connection, "_NEAR_SECONDS", 60.0)  # On a busy machine the first round trip takes milliseconds.
    def test_a_near_peer_gets_another_control_in_the_place_of_bbr(self):
        self.assertEqual(self.fit("bbr"), "cubic" if self.may_choose("cubic") else "reno")

    def test_a_process_that_may_not_choose_cubic_chooses_reno(self):
        chosen = []

        def choose(level, option, name):
            if name == b"cubic":
                raise PermissionError("not allowed")
            chosen.append(name)

        near = connection._MIN_RTT.pack(20)
        with_bbr = mock.create_autospec(socket.socket, instance=True)
        with_bbr.getsockopt.side_effect = lambda level, option, size: near if option == socket.TCP_INFO else b"bbr"
        with_bbr.setsockopt.side_effect = choose
        connection.Connection(with_bbr).fit_congestion_control()
        self.assertEqual(chosen[-1], b"reno")

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
