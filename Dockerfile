# hop_tf with TensorFlow and the examples. docs/kubernetes.md uses it.
#
#     docker build -t hop-tf:cpu .
#     docker build -t hop-tf:gpu --build-arg DEVICE=gpu .
#
# With DEVICE=gpu, kernels for GPUs are compiled, which takes minutes, and TensorFlow brings CUDA's libraries. The machine
# that runs the image needs NVIDIA's driver.
ARG DEVICE=cpu
ARG PYTHON=3.12

FROM python:${PYTHON}-slim-bookworm AS compiler-cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ENV HOP_TF_REQUIRE_NATIVE=1

FROM nvidia/cuda:12.5.1-devel-ubuntu22.04 AS cuda

FROM compiler-cpu AS compiler-gpu
COPY --from=cuda /usr/local/cuda-12.5 /usr/local/cuda-12.5
ENV PATH=/usr/local/cuda-12.5/bin:${PATH} HOP_TF_REQUIRE_CUDA=1

FROM compiler-${DEVICE} AS wheel
WORKDIR /source
COPY LICENSE MANIFEST.in README.md pyproject.toml setup.py ./
COPY hop_tf hop_tf
COPY ops ops
COPY strategies strategies
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim-bookworm
ARG DEVICE
RUN apt-get update && apt-get install -y --no-install-recommends tini && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${DEVICE},examples]"
WORKDIR /opt/hop_tf
COPY examples examples
# Programs need no rights but to write where they are. Volumes are mounted for the same group (`fsGroup`).
RUN useradd --uid 1000 --create-home train && chown train:train /opt/hop_tf
USER 1000
ENV PYTHONUNBUFFERED=1
# It passes SIGTERM on, which Python would not heed as the first process.
ENTRYPOINT ["tini", "--"]
CMD ["python", "examples/cluster.py"]
