"""Words of the pages in a sentence each, shown where a reader points at them; docs/glossary.md has more."""

import re

_TEXT = """\
training: Curves of what the model learns, over the steps of the run.
speed: How many tokens a second the run trains on, and how near that is to what the devices can do.
memory: What the run holds in the memory of a device: projected by kind, and measured.
experts: How evenly the router spreads tokens over the experts of each layer.
segments: A layer is a list of named parts; this is the time of each in a step, from a recorded trace.
pipeline: Layers shared out over ranks in stages: which rank did what when.
compilation: What was compiled, what was rewritten on the way, and what came from the cache.
capture: Parts of a step recorded as graphs, which the device replays without waiting for the host.
model: The preset that the run trains, with its number format and state.
device: What each rank runs on.
parallel layout: How ranks share the work: dp copies of the model, tp parts of each matrix, cp parts of a
    sequence, pp stages of layers, ep experts.
tokens/s/gpu | throughput | throughput of each gpu: Tokens trained on in a second, over the number of GPUs.
tokens/s/process | throughput of each process: Tokens trained on in a second, over the number of processes.
tokens/s each: Tokens trained on in a second, over the number of devices: the median step but the first.
mfu | model flops utilisation: Model FLOPs utilisation: FLOPs that the model's arithmetic needs, over what
    the device could do in the same time at its peak. Recomputed work does not count.
final loss: Cross-entropy in nats of a token of the last step's batch. Lower is better; e to its power is
    how many tokens the model hesitates between.
loss: Cross-entropy in nats of a token of the batch trained on. Lower is better.
validation loss: The same loss on text that the run does not train on.
peak memory: The most that was held on any rank at once.
first step | first step s: Seconds from the command to the end of the first step: start, data, compilation.
configuration: Every key of the run with its value, as on a command line.
environment: Versions, machine and commit that the run was started with.
sample: Text that the model wrote when the run had ended.
model flops of each gpu: FLOPs a second that the model's arithmetic needs, over the number of GPUs.
model flops of each process: FLOPs a second that the model's arithmetic needs, by process.
learning rate: How far a step moves the weights: warm-up, then the schedule of optim.schedule.
gradient norm: Length of the gradient before it is clipped to train.clip_grad_norm. Peaks are batches that
    pull hard; a rise over many steps is a warning.
other losses: Terms added to the loss with a weight: for even experts, small router scores, further tokens.
loss of load balance: A term that is 1 where the router spreads tokens evenly, more where it does not.
loss of router z: A term that keeps the router's scores small.
loss of multi-token prediction: The loss of the layers that predict tokens after the next.
memory by kind: Projected bytes of weights, gradients, optimizer state and activations; in a run's report
    beside the measured peak.
peak memory so far: The most that rank 0 has held at once up to a step.
load of experts: Tokens that an expert gets over the mean of its layer: 1 is balanced, 0 is an expert that
    nothing reaches and that learns nothing.
fullest expert: Load of the fullest expert of a layer; 1 is balance. Where ranks share experts, the fullest
    rank is the one that the others wait for.
router entropy: How undecided the router is: ln(experts) where it finds all alike, 0 where it is certain.
time by segment: Time of a step by part of a layer and by direction.
s per step: Seconds of a step, the median but the first, which compiles.
peak gib: The most memory that was held at once, in GiB of 2^30 bytes.
val loss: Final loss on text that the run does not train on; empty where the last step was not validated.
state: How the run ended, as far as its folder says.
pass: A rewrite of the traced graph, before it is compiled.
matches: Places in the graphs that the pass rewrote.
operations: Operations of those graphs before and after.
kept for backward: Results of the forward that are held until the backward needs them.
unit: Neighbouring segments that are compiled as one.
graphs: Graphs made of it: forward, gradients of inputs, gradients of weights.
captured: Units that replay from graphs.
places: Layers and micro-batches that it was captured for.
nodes: Kernels and copies in its graphs.
"""
_ROWS = [row.split(": ", 1) for row in re.sub(r"\n +", " ", _TEXT).splitlines()]
TERMS = {name: says for names, says in _ROWS for name in names.split(" | ")}
