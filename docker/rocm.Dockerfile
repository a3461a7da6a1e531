# graphmoe on AMD GPUs, from a checkout's top folder:
#   docker build -f docker/rocm.Dockerfile -t graphmoe-rocm .
#   docker run --device /dev/kfd --device /dev/dri --group-add video --ipc=host --security-opt seccomp=unconfined --rm \
#       -v $PWD/outputs:/workspace/outputs graphmoe-rocm train model=tiny_gqa host=amd train.steps=20
# BASE is any image with ROCm 7 and torch 2.11 to 2.15; this one has Primus-Turbo too.
ARG BASE=rocm/primus:v26.9
FROM ${BASE}
# the base is pinned, and with it the distribution
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
COPY . /opt/graphmoe
# torch and triton are those of the image.
RUN grep -vE '^(torch|triton)==' /opt/graphmoe/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt '/opt/graphmoe[hf,sweeps,wandb]'
# fails if pip replaced the image's torch, which is not in the range above
RUN python -c 'import torch; assert torch.version.hip, torch.__version__'
WORKDIR /workspace
ENTRYPOINT ["graphmoe"]
