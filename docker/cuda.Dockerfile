# graphmoe on NVIDIA GPUs, from a checkout's top folder:
#   docker build -f docker/cuda.Dockerfile -t graphmoe .
#   docker run --gpus all --ipc=host --rm -v $PWD/outputs:/workspace/outputs graphmoe train model=tiny_gqa train.steps=20
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-devel
FROM ${BASE}
# the base is pinned, and with it the distribution
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
COPY . /opt/graphmoe
# torch and triton are those of the image.
RUN grep -vE '^(torch|triton)==' /opt/graphmoe/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt '/opt/graphmoe[hf,sweeps,wandb]'
# fails if pip replaced the image's torch
RUN python -c 'import torch; assert torch.version.cuda, torch.__version__'
WORKDIR /workspace
ENTRYPOINT ["graphmoe"]
