"""The environment variables of Slurm."""

from absl.testing import absltest, parameterized

from hop_tf.errors import ClusterConfigError
from hop_tf.launchers import slurm

_STEP = {
    "SLURM_JOB_ID": "1000",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "node[01-03],big",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
}


class HostsTest(parameterized.TestCase):
    @parameterized.parameters(
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("node[1]", ["node1"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[01-03,07],other5", ["node01", "node02", "node03", "node07", "other5"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("node[009-011]", ["node009", "node010", "node011"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a-b[1-2].example.org,c_d", ["a-b1.example.org", "a-b2.example.org", "c_d"]),
        ("[1-2]", ["1", "2"]),
        ("x[1,2,3],y[4],z", ["x1", "x2", "x3", "y4", "z"]),
        (" a,b\n", ["a", "b"]),
    )
    def test_expands(self, text, hosts):
        self.assertEqual(slurm.expand_hosts(text), hosts)

    @parameterized.parameters("", ",", "a,,b", "a[1-2", "a]", "a[[1]]", "a[1-2],", "[")
    def test_refuses(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "A list of nodes must be like.*Received: "):
            slurm.expand_hosts(text)

    @parameterized.parameters("a[]", "a[x]", "a[3-1]", "a[1-]", "a[-2]", "a[1--2]", "a[1,]", "a[²]")
    def test_refuses_ranges(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "Ranges must be like"):
            slurm.expand_hosts(text)

    @parameterized.parameters(("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("4,2(x2)", [4, 2, 2]), ("16(x1)", [16]))
    def test_counts(self, text, counts):
        self.assertEqual(slurm.expand_counts(text), counts)

    @parameterized.parameters("", "x", "2(3)", "2(x)", "2,,1", "-1", "2(x3", "1.5")
    def test_refuses_counts(self, text):
        with self.assertRaisesRegex(ClusterConfigError, "must be like '2"):
            slurm.expand_counts(text)


class LayoutTest(parameterized.TestCase):
    @parameterized.parameters("block", "block:cyclic", "", "block,Pack")
    def test_block(self, distribution):
        self.assertEqual(slurm.lay_out([2, 1], distribution), [(0, 0), (0, 1), (1, 0)])

    @parameterized.parameters("cyclic", "cyclic:block", "cyclic,NoPack")
    def test_cyclic(self, distribution):
        self.assertEqual(slurm.lay_out([3, 1, 2], distribution), [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1), (0, 2)])


class ReadTest(parameterized.TestCase):
    def test_reads_a_step(self):
        place = slurm.read_slurm(_STEP)
        self.assertEqual((place.number, place.num_processes, place.local_number, place.num_local), (3, 7, 1, 2))
        hosts = [address.split(":")[0] for address in place.addresses]
        self.assertEqual(hosts, ["node01"] * 2 + ["node02"] * 2 + ["node03"] * 2 + ["big"])
        self.assertLen(set(place.addresses), 7)

    def test_all_tasks_see_the_same_addresses(self):
        places = []
        for number in range(7):
            own = {"SLURM_PROCID": str(number), "SLURM_NODEID": str(number // 2), "SLURM_LOCALID": str(number % 2)}
            places.append(slurm.read_slurm({**_STEP, **own}))
        self.assertLen({place.addresses for place in places}, 1)
        self.assertEqual([place.number for place in places], list(range(7)))

    def test_cyclic(self):
        place = slurm.read_slurm({**_STEP, "SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "3", "SLURM_LOCALID": "0"})
        self.assertStartsWith(place.addresses[3], "big:")
        self.assertStartsWith(place.addresses[4], "node01:")

    def test_ports_of_steps_and_jobs_differ(self):
        ports = {
            slurm.read_slurm({**_STEP, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).addresses[0]
            for job, step in (("1000", "0"), ("1000", "1"), ("1002", "0"))
        }
        self.assertLen(ports, 3)

    @parameterized.parameters(
        ("12000-12003,13000", ("12000", "12001")),
        ("[12007,12000-12003]", ("12007", "12000")),
        ("9,8", ("9", "8")),
    )
    def test_reserved_ports(self, text, ports):
        addresses = slurm.read_slurm({**_STEP, "SLURM_STEP_RESV_PORTS": text}).addresses
        self.assertEqual([address.split(":")[1] for address in addresses], [*ports * 3, ports[0]])

    def test_refuses_reserved_ports(self):
        with self.assertRaisesRegex(ClusterConfigError, "Ranges must be like"):
            slurm.read_slurm({**_STEP, "SLURM_STEP_RESV_PORTS": "12000-"})

    def test_first_port(self):
        addresses = slurm.read_slurm({**_STEP, "HOP_TF_FIRST_PORT": "3000"}).addresses
        self.assertEqual(addresses[:3], ("node01:3000", "node01:3001", "node02:3000"))

    @parameterized.parameters({}, {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, {"SLURM_STEP_NODELIST": "a"})
    def test_not_started_by_srun(self, **environ):
        self.assertIsNone(slurm.read_slurm(environ))

    @parameterized.parameters(
        ({"SLURM_PROCID": "7"}, "SLURM_PROCID and SLURM_STEP_TASKS_PER_NODE contradict.*task 7 of 7 tasks"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID must be a number"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "SLURM_STEP_NUM_TASKS='8', SLURM_STEP_TASKS_PER_NODE='2.x3.,1'. Start"),
        ({"SLURM_STEP_NODELIST": "a,b"}, "2 nodes, but tasks of 4.*SLURM_STEP_NODELIST='a,b'"),
        ({"SLURM_LOCALID": "0"}, "Task 3 should be task 1 of node 1.*SLURM_LOCALID='0'.*srun --distribution=block"),
        ({"SLURM_STEP_RESV_PORTS": "12000"}, "a port for each task of a node, 2.*srun --resv-ports=2"),
        ({"HOP_TF_FIRST_PORT": "65535"}, "2 ports.*HOP_TF_FIRST_PORT='65535'"),
        ({"HOP_TF_FIRST_PORT": "0"}, "HOP_TF_FIRST_PORT='0'"),
        ({"HOP_TF_FIRST_PORT": "x"}, "HOP_TF_FIRST_PORT='x'"),
    )
    def test_refuses(self, changed, message):
        with self.assertRaisesRegex(ClusterConfigError, message):
            slurm.read_slurm({**_STEP, **changed})

    def test_refuses_half_of_the_variables(self):
        environ = {name: value for name, value in _STEP.items() if name != "SLURM_STEP_TASKS_PER_NODE"}
        with self.assertRaisesRegex(ClusterConfigError, "go together.*no SLURM_STEP_TASKS_PER_NODE"):
            slurm.read_slurm(environ)


if __name__ == "__main__":
    absltest.main()
