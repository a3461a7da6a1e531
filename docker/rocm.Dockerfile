# graphmoe on AMD GPUs, from a checkout's top folder:
#   docker build -f docker/rocm.Dockerfile -t graphmoe-rocm .
#   docker run --device /dev/kfd --device /dev/dri --group-add video --ipc=host --security-opt seccomp=unconfined --rm \
#       -v $PWD/outputs:/workspace/outputs graphmoe-rocm train model=tiny_gqa host=amd train.steps=20
# Set BASE to the image of your ROCm version whose torch is 2.11 to 2.15.
ARG BASE=rocm/pytorch:latest
FROM ${BASE}
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
COPY . /opt/graphmoe
# torch and triton are those of the image.
RUN grep -vE '^(torch|triton)==' /opt/graphmoe/constraints.txt > /tmp/constraints.txt \
    && pip install --no-cache-dir -c /tmp/constraints.txt '/opt/graphmoe[hf,sweeps,wandb]'
WORKDIR /workspace
ENTRYPOINT ["graphmoe"]
