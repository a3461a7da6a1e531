"""Rules that join several keys: every one speaks up."""

import re

import pytest
from omegaconf import OmegaConf

from graphmoe.command.hydra import schema
from graphmoe.plan.experts import EXPERT_KEYS
from graphmoe.plan.rules import violations

SHORT = {
    "PIPELINE": "launch.nproc=2 launch.nodes=1 parallel.pp=2",
    "OVERLAP": "parallel.ep=2 moe.dispatcher=symm pipeline.ep_overlap=true",
    "REPLICAS": "parallel.ep=2 moe.dispatcher=symm moe.balance=replicas",
    "FP8_ROWS": "parallel.ep=2 moe.dispatcher=symm moe.dispatch_dtype=fp8 FP8=rowwise",
    "FP8=": "compile.enabled=true precision.fp8=",
    "VENDOR": "model.hidden_size=2048 model.num_experts=64 launch.nproc=8 train.global_batch_size=96 "
    "train.micro_batch_size=1",
    "SYMM": "parallel.ep=8 moe.dispatcher=symm train.global_batch_size=64",
}
TABLE = """
moe.dispatcher=symm | parallel.etp is 1; use moe.dispatcher=auto or local
parallel.ep=2 parallel.etp=2 moe.dispatcher=symm launch.nproc=2 launch.nodes=2
    | ranks are not a multiple of parallel.ep * parallel.etp = 4; use a product that divides 2, or
parallel.pp=2 pipeline.schedule=zb1p passes.disabled=[split_backward] | let the pass split_backward run
parallel.pp=2 pipeline.schedule=zbv passes.enabled=[fuse_experts] | calls; let the pass split_backward run
parallel.ep=2 moe.dispatcher=symm moe.receive_budget=0 | must be a number greater than 0, or worst_case
parallel.ep=2 moe.dispatcher=symm moe.receive_budget=most | must be a number greater than 0, or worst_case
parallel.ep=2 moe.balance=replicas
    | sends rows to the rank that owns their expert; use moe.dispatcher=symm, or moe.balance=none
moe.balance=replicas
    | parallel.ep=1 has all experts on every rank; use parallel.ep=2 or more, or moe.balance=none
parallel.ep=2 parallel.etp=2 moe.dispatcher=symm moe.balance=replicas
    | parallel.etp=2 splits each expert over several ranks; use moe.balance=none
REPLICAS model.layer=graphmoe.model.layer:MoELayer | MoELayer may have other experts; use moe.balance=none
moe.force_balance=true moe.expert_load=burst | both replace the router's choice; use one
moe.expert_load=hot | moe.expert_load=hot: there is no such load; use none, balanced, hot_experts, hot_rank,
model.num_experts=256 model.top_k=128 moe.expert_load=burst | must be at most 127 where moe.expert_load=burst
moe.expert_load=/no/loads.json | moe.expert_load: /no/loads.json cannot be read
parallel.ep=2 pipeline.ep_overlap=true | moe.dispatcher=alltoall has none; use moe.dispatcher=symm
OVERLAP compile.enabled=false | pipeline.ep_overlap=true needs compiled units; use compile.enabled=true
OVERLAP passes.disabled=[split_backward] | let the pass split_backward run
parallel.tp=2 model.num_heads=3 | attention heads that it splits; use parallel.tp=1, or model.num_heads=2 or 4
parallel.tp=4 model.attention=gqa model.num_kv_heads=2 | use parallel.tp=1 or 2, or model.num_kv_heads=4 or 8
parallel.tp=2 model.dense_ffn_size=9 | model.dense_ffn_size=9, the width of the dense MLP
parallel.tp=2 model.vocab_size=4097 | model.vocab_size=4097, the rows of embedding and head
parallel.tp=2 data.seq_len=63 | data.seq_len=63, the tokens of a sequence
parallel.tp=2 model.context_length=63 | data.seq_len=63, the tokens of a sequence
optim.name=muon parallel.tp=2 | optim.name=muon updates whole; use parallel.tp=1, or optim.name=adamw
optim.name=muon parallel.etp=2 | parallel.etp=2 shards matrices, which optim.name=muon updates whole; use
optim.name=graphmoe.optim.muon:MUON parallel.tp=2 | shards matrices, which optim.name=graphmoe.optim.muon:MUON
optim.master_dtype=bf16 precision.compute=fp32 | precision.compute=fp32 are fp32; use precision.compute=bf16
model.num_experts=0 model.num_dense_layers=5 | every layer dense; use model.num_dense_layers=4
model.num_experts=0 model.num_dense_layers=0 | every layer dense; use model.num_dense_layers=4
model.num_experts=0 graph.scope=[moe_router,shared_experts] compile.enabled=true | and the model has none; use
model.rope_scaling=llama3 model.llama3_factor=.inf | model.llama3_factor=inf must be 1 or greater
model.rope_scaling=llama3 model.llama3_high_freq_factor=1 | must exceed model.llama3_low_freq_factor=1.0
model.num_dense_layers=5 | exceeds model.num_layers=4; use 0 to 4
model.attention=gqa model.num_kv_heads=3 | does not divide model.num_heads=4; use one of [1, 2, 4]
model.attention=gqa model.num_kv_heads=0 | model.num_kv_heads=0 does not divide
model.attention=gqa model.head_dim=7 | model.head_dim=7 must be even
model.qk_rope_head_dim=5 | model.qk_rope_head_dim=5 must be even
model.qk_norm=true | model.qk_norm=true applies to model.attention=gqa only; use model.qk_norm=false
model.qk_norm_whole=true | model.qk_norm_whole=true applies to model.attention=gqa only; use
model.rotary_fraction=0.5 | model.rotary_fraction=0.5 applies to model.attention=gqa only; use
model.attention=gqa model.qk_norm_whole=true | with model.qk_norm=false; use model.qk_norm_whole=false
model.attention=gqa model.head_dim=10 model.rotary_fraction=0.5 | =0.5 must make an even number of
model.attention=gqa model.rotary_fraction=0 | model.rotary_fraction=0 must make an even number
model.attention=gqa model.rotary_fraction=0.26 | model.rotary_fraction=0.26 must make an even number
model.shared_gate=true model.shared_ffn_size=0 | with model.shared_ffn_size=0; use model.shared_gate=false
model.window=8 | model.window=8 applies to model.attention=gqa only; use model.window=0
model.attention_bias=qkv | model.attention_bias=qkv applies to model.attention=gqa only; use
model.attention=gqa model.full_every=2 | has no effect with model.window=0; use model.full_every=0
model.attention=gqa model.window=8 model.full_every=5 | must be 0 or 2 to model.num_layers=4; with 1
model.attention=gqa model.window=8 model.head_dim=320 | has kernels for heads up to 256, and
model.rope_scaling=yarn model.yarn_factor=0.5 | model.yarn_factor=0.5 must be 1 or greater
model.rope_scaling=yarn model.yarn_factor=.nan | model.yarn_factor=nan must be 1 or greater
model.rope_scaling=yarn model.yarn_beta_fast=0.5 | model.yarn_beta_slow=1.0; swap them
model.top_k=9 | model.top_k=9 exceeds model.num_experts=8; use 1 to 8
model.softmax_after_topk=true model.score_function=sigmoid | needs model.score_function=softmax, not sigmoid
model.softmax_after_topk=true model.renormalise=true | has no effect with
model.expert_bias=true parallel.etp=2 | model.expert_bias=true would add its bias 2 times; use parallel.etp=1
REPLICAS model.expert_bias=true | adds biases, which are not replicated; use moe.balance=none
model.expert_bias=true moe.experts=my.code:Mine | may compute SwiGLU without biases or clamps, not model.exp
model.swiglu_limit=7 moe.experts=my.code:Mine | not model.swiglu_limit=7.0; use moe.experts=auto or torch
model.num_groups=3 | does not divide model.num_experts=8; use one of [1, 2, 4, 8]
model.num_groups=2 model.topk_groups=3 | exceeds model.num_groups=2; use 1 to 2
model.num_groups=8 model.topk_groups=1 | leaves 1 experts for model.top_k=2; use model.topk_groups=2
data.bpe_vocab_size=5000 | data.bpe_vocab_size=5000 must be from 300 to model.vocab_size=4096
data.bpe_vocab_size=299 | data.bpe_vocab_size=299 must be from 300
model.vocab_size=299 | data.bpe_vocab_size=4096 must be from 300 to model.vocab_size=299
data.source=files data.tokenizer=t | data.source=files needs data.paths, e.g. 'data.paths=[
data.source=memmap | data.source=memmap needs data.paths
data.source=files data.paths=[a] | data.source=files needs data.tokenizer
data.source=hf data.tokenizer=t | data.source=hf needs data.hf_name
data.paths=[a] | data.paths=[a] has no effect with data=stdlib; add data=files or data=chat or data=memmap, or
data.hf_name=me/texts | data.hf_name=me/texts has no effect with data=stdlib; add data=chat or data=hf, or
data.source=memmap data.paths=[a] data.text_field=body | data.text_field=body has no effect with data=memmap
data.source=synthetic data.shuffle=false | data.shuffle=false has no effect with data=synthetic; add data=
data.source=hf data.hf_name=a data.tokenizer=t data.paths=[a] | data.paths=[a] has no effect with data=hf; add
data.source=files data.paths=[a] data.tokenizer=t data.bpe_vocab_size=500 | has no effect with data=files; add
data.source=memmap data.paths=[a,b] data.weights=[1] | must have one weight for each of the 2 data.paths
data.source=memmap data.paths=[a] data.weights=[0] | data.weights=[0.0] must be greater than 0
data.source=memmap data.paths=[a] data.weights=[.inf] | data.weights=[inf] must be greater than 0
data.document_mask=true data.source=synthetic
    | data.source=synthetic has none without data.document_length; set data.document_length, e.g. 1024, or use
data.document_mask=true data.source=memmap data.paths=[a]
    | has none without data.tokenizer; set data.tokenizer, whose end token the files have, or use
data.document_mask=true model.layer=graphmoe.model.layer:MoELayer | does not set documents; use model.layer=
data.source=synthetic data.document_length=1 | data.document_length=1 would leave no label; use 2 or more
data.document_mask=true model.v_head_dim=264 | has kernels for heads up to 256, and those of the model
data.document_length=9 | data.document_length=9 has no effect with data=stdlib; add data=synthetic, or leave
data.document_mask=true parallel.cp=3 data.seq_len=48 | ring, whose kernels have no masks or sinks; use
data.document_mask=true parallel.cp=2 parallel.tp=2 parallel.cp_method=ring
    | or sinks; use parallel.cp_method=alltoall with parallel.cp=1 or 2
model.attention=gqa model.num_kv_heads=2 parallel.cp=4 model.window=16 parallel.cp_method=ring
    | model.window=16 cannot run with parallel.cp=4 by parallel.cp_method=ring
precision.fp8_products=[expert] | precision.fp8_products=['expert'] has expert; did you mean 'experts'?
precision.fp8_products=[] | precision.fp8_products=[] is empty; use some of experts, attn
precision.fp8=rowwise passes.enabled=[] | needs the passes fp8_quantise, fp8_linear, fp8_experts, which
model.num_layers=3 model.mtp_depth=1 precision.fp8_skip_layers=[0,4,-5]
    | precision.fp8_skip_layers=[0, 4, -5] has 4, -5; use -4 to 3
model.num_layers=2 precision.fp8=rowwise compile.enabled=true precision.fp8_skip_layers=[0,-1]
    | precision.fp8_skip_layers=[0, -1] skips all layers; skip fewer, or use precision.fp8=none
precision.fp8=rowwise model.expert_ffn_size=24 | of 16, and model.expert_ffn_size of a rank is 24; use 32
precision.fp8=rowwise compile.enabled=false | compile.enabled=false; use compile.enabled=true
precision.fp8=rowwise compile.enabled=true parallel.ep=2 moe.dispatcher=alltoall | moe.dispatcher=symm, or
FP8=blockwise | than bf16; use precision.fp8=rowwise, or precision.fp8_products=[attn,mlp,shared_experts]
precision.fp8=mxfp8 model.hidden_size=128 model.expert_ffn_size=48
    | precision.fp8=mxfp8 of experts needs multiples of 32, and model.expert_ffn_size of a rank is 48; use 64
precision.fp8=blockwise model.hidden_size=128 moe.experts=turbo
    | needs multiples of 128, and model.expert_ffn_size of a rank is 176; use 256
moe.experts=te precision.fp8=rowwise | moe.experts=te computes in bf16 only, not by precision.fp8=rowwise
FP8_ROWS moe.dispatch_dtype=bf16 moe.experts=turbo moe.balance=replicas
    | and moe.experts=turbo in fp8 computes scales over weights of unused slots too; use moe.balance=none
FP8_ROWS moe.experts=turbo | but moe.experts=turbo has its own quantized layout; use moe.dispatch_dtype=
FP8=tensorwise parallel.dp_shard=fsdp2 | use precision.fp8=rowwise, or parallel.dp_shard=zero1
FP8_ROWS precision.fp8=tensorwise | but precision.fp8=tensorwise does not scale by row
moe.dispatch_dtype=fp8 | but precision.fp8=none does not use fp8; use moe.dispatch_dtype=auto or bf16
FP8_ROWS precision.fp8_products=[attn] | but the experts of precision.fp8_products=[attn] do not use fp8
FP8_ROWS precision.fp8=mxfp8 model.expert_ffn_size=64
    | but precision.fp8=mxfp8 does not scale by row; use moe.dispatch_dtype=auto or
FP8_ROWS moe.dispatcher=nvshmem | fp8 experts, but moe.dispatcher=nvshmem cannot send fp8 rows; use
FP8_ROWS passes.disabled=[fp8_experts] | needs the passes fp8_experts, which passes.enabled or
FP8_ROWS model.layer=graphmoe.model.layer:MoELayer | model.layer:MoELayer may not use fp8; use
train.tokens=many | train.tokens=many must be a number of tokens from 1 to 1e+18, such as 1e9 or 300M (K, M,
train.tokens=0 | train.tokens=0 must be
train.tokens=1e6 train.epochs=2 | both set the length of the run; leave one of them out
train.tokens=1M optim.schedule=wsd optim.warmup_steps=14 | begins, which is step 13 of train.steps=16
data.seq_len=5000 | data.seq_len=5000 exceeds model.context_length=4096; use at most 4096
data.seq_len=2 model.mtp_depth=2 | leaves no label for model.mtp_depth=2; use at least 3
optim.wsd_decay_fraction=0 | never decays; use a share above 0, or optim.schedule=constant
optim.schedule=wsd optim.wsd_decay_fraction=0.5 train.steps=100 optim.warmup_steps=51
    | is step 50 of train.steps=100 (optim.wsd_decay_fraction=0.5); use at most optim.warmup_steps=50
train.seed=9223372036854775808 | train.seed=9223372036854775808 needs more than 64 bits
train.global_batch_size=10 train.micro_batch_size=4 | =2 or train.global_batch_size=12
launch.nproc=8 train.global_batch_size=48 | 8 workers (launch.nproc times launch.nodes); use a multiple of 32
launch.nproc=8 parallel.tp=2 train.global_batch_size=24 | times 4 data-parallel ranks; use a multiple of 16
parallel.cp=4 parallel.cp_method=alltoall model.num_heads=6
    | of parallel.tp=1 has of model.num_heads=6; use parallel.cp_method=ring, or parallel.cp=1 or 2 or 3
parallel.cp=2 parallel.tp=2 parallel.cp_method=alltoall model.attention=gqa model.num_kv_heads=2
    | the 1 that a rank of parallel.tp=2 has of model.num_kv_heads=2; use parallel.cp_method=ring
parallel.cp=2 data.seq_len=65 | * parallel.tp=1 ranks: it is not a multiple of 2; use data.seq_len=64 or 66
parallel.cp=4 parallel.tp=2 parallel.cp_method=ring data.seq_len=60 | of 8; use data.seq_len=56 or 64
parallel.cp=2 parallel.cp_method=ring model.attention_backend=te compile.enabled=false
    | by parallel.cp_method=ring needs; use one of: auto, sdpa; or parallel.cp_method=alltoall
launch.nproc=8 launch.nodes=1 parallel.ep=4 parallel.dp_shard=fsdp2 parallel.dp_shard_size=3
    | does not divide the 8 ranks of a pipeline stage, with parallel.tp=1 and parallel.ep * parallel.etp = 4
launch.nproc=8 launch.nodes=1 parallel.etp=4 parallel.dp_shard=fsdp2 parallel.dp_shard_size=16
    | of them in a row; use 1, 2, 4, 8, or null
parallel.pp=2 compile.enabled=true graph.scope=full_iteration profile.pipeline=true
    | use profile.pipeline=false, or another graph.scope
PIPELINE pipeline.schedule=zbb | pipeline.schedule=zbb: there is no such choice; use one of gpipe,
PIPELINE pipeline.microbatches=3 | ranks is 4; use pipeline.microbatches=4, or train.global_batch_size=12
PIPELINE train.global_batch_size=1 train.micro_batch_size=2 | e.g. train.micro_batch_size=1 or train.glob
PIPELINE pipeline.layout=EttttL | use 1 border |
PIPELINE pipeline.costs=[moo:1] | pipeline.costs=['moo:1']: 'moo'
PIPELINE pipeline.costs=[attn..mpl:1] | 'attn..mpl' is not a part
PIPELINE pipeline.costs=[moe..loss:1] | , or a unit of neighbouring segments such as attn..moe_combine
PIPELINE pipeline.costs=[moe_combine..attn:1] | 'moe_combine..attn' is not a part
PIPELINE pipeline.costs=[attn..moe_router..moe_combine:1] | 'attn..moe_router..moe_combine' is not a part
PIPELINE pipeline.costs=[dense:1,moe:1] | no time for loss
PIPELINE pipeline.costs=[dense:1,attn:1,loss:1] | no time for moe_router, moe_preprocess,
PIPELINE pipeline.costs=[attn..mlp:1,mlp:1,moe:1] | 'attn..mlp' and 'mlp' both have the time of mlp; leave
PIPELINE pipeline.costs=[moe:5,loss:3,dense:1] model.num_dense_layers=0 | dense: the model has no such part
PIPELINE pipeline.costs=[moe:5,loss:3,dense:2,mtp:1] | mtp: the model has no such part
PIPELINE pipeline.costs=[moe:5,loss:3,dense:2,attn:1] | attn: the model has no such part, or its time is given
PIPELINE pipeline.costs=[moe:5,loss:3,dense:2,shared_experts:1] model.shared_ffn_size=0
    | shared_experts: the model has no such part
PIPELINE pipeline.costs=[moe:1,moe:2] | pipeline.costs has more than one time for a part; leave one
PIPELINE pipeline.costs=[moe] | 'moe' must be a part and its milliseconds
PIPELINE pipeline.costs=[dense:1] | or of moe as a whole
PIPELINE pipeline.costs=[dense:1,moe:-2,loss:1] | the time of 'moe' is -2.0 ms
PIPELINE pipeline.layout=Ett|ttL pipeline.costs=[moe:1] | leave one out
launch.nproc=8 launch.nodes=1 parallel.pp=8 | of which each stage needs one; use 1 to 6 stages
PIPELINE pipeline.schedule=zbv pipeline.virtual_stages=3
    | which has 2 on each rank; use 2, or a schedule that takes 3: interleaved
PIPELINE pipeline.schedule=interleaved pipeline.virtual_stages=1
    | has 2 or more on each rank; use 2 or more, or a schedule that takes 1: gpipe, 1f1b, zb1p
launch.nproc=6 launch.nodes=1 parallel.tp=4
    | parallel.pp=1 = 4 does not divide the 6 ranks (launch.nproc * nodes); use a multiple of 4 ranks
launch.nproc=8 launch.nodes=1 parallel.dp=3 parallel.tp=2
    | = 6 is not the number of ranks, 8; use parallel.dp=4
launch.nproc=4 launch.nodes=1 parallel.ep=8
    | a pipeline stage (parallel.dp=4 * parallel.cp=1 * parallel.tp=1); use parallel.ep * parallel.etp of 1, 2
checkpoint.init_from=a checkpoint.resume_from=b | use one of the two
recompute.all=true recompute.segments=[attn] recompute.layer_ids=[1]
    | leave out recompute.segments=['attn'] and recompute.layer_ids=[1], or use recompute.all=false
recompute.segments=[attn,loss,embed] | 'loss', 'embed'] has loss, embed; use attn, mlp, moe_router, moe_pre
recompute.segments=[attn,mlp,attn] | names attn twice; name each once
recompute.ops=[moe_act,norm] | has norm; use layernorm, core_attn, mla_up_proj, moe_act, mlp, shared_experts
recompute.ops=[layernorm] compile.enabled=false | use compile.enabled=true, or recompute.segments
recompute.layer_ids=[-1,2] | recompute.layer_ids=[-1, 2] has -1; use 0 to 3
recompute.layer_ids=[4,5] model.mtp_depth=1 | has 5; use 0 to 4
recompute.layer_ids=[1,1] | recompute.layer_ids=[1, 1] names 1 twice
recompute.segments=[moe_router] recompute.layer_ids=[9] | has 9; use 0 to 3
recompute.segments=[attn,moe_experts] recompute.layer_ids=[0] | it out, or name some of the layers 1 to 3
recompute.segments=[shared_experts] model.shared_ffn_size=0 | shared_experts, which this model does not have
recompute.ops=[mla_up_proj] model.attention=gqa | recompute.ops names mla_up_proj, which this model
recompute.ops=[mlp] model.num_dense_layers=0 | names mlp, which this model does not have; leave it out
recompute.segments=[moe_router] model.num_dense_layers=4 | names moe_router, which this model does not have
graph.scope=attn | graph.scope=attn is one segment; name it in a list: 'graph.scope=[attn]'
graph.scope=[attn,attn] | names a segment twice; name each once
graph.scope=full_iteration moe.sync_free_stage=2 compile.enabled=false
    | use moe.sync_free_stage=3 or auto, or graph.scope=none
moe.sync_free_stage=0 graph.scope=partial | use moe.sync_free_stage=1 or auto, or graph.scope=[attn]
moe.sync_free_stage=2 graph.scope=moe | use moe.sync_free_stage=3 or auto, or graph.scope=[moe_router,
moe.sync_free_stage=2 graph.scope=[moe_experts] | use moe.sync_free_stage=3 or auto, or graph.scope=none
moe.sync_free_stage=1 graph.scope=full_iteration
    | or graph.scope=[embed,attn,mlp,moe_router,moe_preprocess,shared_experts,loss]
moe.sync_free_stage=1 graph.scope=all | graph.scope=all has all; use one of
parallel.ep=2 graph.scope=moe | arrive; use graph.scope=[moe_router,moe_preprocess], or moe.dispatcher=symm
parallel.etp=2 graph.scope=full_iteration moe.sync_free_stage=3 compile.enabled=false
    | use graph.scope=none, or moe.dispatcher=symm
moe.dispatcher=alltoall moe.sync_free_stage=2 | use moe.sync_free_stage=1 or auto, or moe.dispatcher=local
parallel.ep=2 moe.sync_free_stage=0 graph.scope=partial | moe.sync_free_stage=1 or auto, or graph.
parallel.ep=3 model.num_experts=8 | cannot be split over parallel.ep=3; use a divisor of 8: 1, 2, 4, 8
parallel.etp=6 model.expert_ffn_size=16 | be split over parallel.etp=6; use a divisor of 16: 1, 2, 4, 8, 16
parallel.ep=2 model.num_dense_layers=4 | parallel.ep=2 splits experts, but the model has none
parallel.ep=2 moe.dispatcher=local | use moe.dispatcher=auto or alltoall
profile.steps=[[]] | profile.steps=[[]] must be a list of whole numbers
launch.fake_world=8 launch.fake_rank=8 | use 0 to 7
launch.fake_world=8 launch.fake_rank=-1 | launch.fake_rank=-1 is not among the ranks
launch.fake_world=6 parallel.pp=4 | does not divide the 6 ranks
launch.fake_world=8 parallel.pp=8 | the model has
launch.fake_world=8 parallel.pp=2 pipeline.microbatches=3 train.global_batch_size=64
    | use pipeline.microbatches=
launch.fake_world=8 parallel.pp=2 pipeline.microbatches=0 train.global_batch_size=16 | greater than 0
launch.fake_world=8 launch.nproc=2 | leave those two out
launch.fake_world=8 launch.write_only=true | leave one of them out
launch.fake_world=8 train.global_batch_size=24 | use a multiple of
profile.steps=[1,2,3] | has 3 numbers; use the first and the last, or one
profile.steps=[0,2] | counted from 1, e.g. [10,12]
profile.steps=[3,2] | must be the first and the last step
profile.steps=[3,9] train.steps=5 | goes beyond train.steps=5; use at most [3, 5]
profile.steps=[9] train.steps=5 | goes beyond train.steps=5; use at most [5]
profile.steps=[1] profile.ranks=[] | must be ranks
profile.steps=[1] profile.ranks=[0,0] | each once
profile.steps=[1] profile.ranks=[-1] | counted from 0
profile.steps=[1] launch.fake_world=8 | leave one of them out
profile.steps=[1] profile.ranks=[0,2] launch.nproc=2 launch.nodes=1
    | profile.ranks=[0, 2] has a rank that is none of 2; use 0 to 1
graph.scope=[attn,optimizer]
    | has optimizer; use one of none, partial, moe, layer, full_iteration, auto, or a list
graph.scope=[] | names no segment; use graph.scope=none
graph.scope=partial compile.enabled=false
    | compile.enabled=true, graph.scope=full_iteration or graph.scope=none
train.global_batch_size=65537 train.micro_batch_size=1 | per rank in each step; use at most 65536
VENDOR moe.dispatcher=deepep parallel.ep=2 parallel.etp=2 | each expert over several; use parallel.etp=1
VENDOR moe.dispatcher=deepep | parallel.ep=1; use parallel.ep of these, or moe.dispatcher=auto
VENDOR moe.dispatcher=deepep parallel.ep=16 launch.nproc=16 | moe.dispatcher=alltoall, or symm within a node
VENDOR moe.dispatcher=deepep parallel.ep=2 model.num_experts=512 | parallel.ep=2 is 256; use more ranks
VENDOR moe.dispatcher=deepep parallel.ep=2 precision.compute=fp32
    | use precision.compute=bf16, or moe.dispatcher=alltoall
VENDOR moe.dispatcher=deepep parallel.ep=2 model.hidden_size=2880
    | rows of a multiple of 256 values, 7936 at most, not model.hidden_size=2880; use such a size, or
VENDOR moe.dispatcher=deepep parallel.ep=2 model.hidden_size=8192 | 7936 at most, not model.hidden_size=8192
VENDOR moe.dispatcher=turbo parallel.ep=2 model.hidden_size=2052 | of 8 values, not model.hidden_size=2052
VENDOR moe.dispatcher=deepep parallel.ep=8 model.top_k=33 | 32 experts per token, not model.top_k=33; use
VENDOR moe.dispatcher=nvshmem parallel.ep=2 parallel.etp=3 model.expert_ffn_size=48 launch.nproc=6
    | parallel.ep=2 * parallel.etp=3 = 6; use such a product, or moe.dispatcher=alltoall, or
VENDOR moe.dispatcher=nvshmem | * parallel.etp=1 = 1; use such a product, or moe.dispatcher=auto
"""
"""Words, which break one rule, and what the violation says."""
RULES = [tuple(rule.split(" | ")) for rule in re.sub(r"\n    \|", " |", TABLE).strip().splitlines()]
RULES += [
    (f"run.name={'a' * 201}", "use at most 200 bytes, all of them printable"),
    ("run.name=a\u200bb", "use at most 200 bytes, all of them printable"),
    ("run.name=a/b", "run.name='a/b' cannot be a folder name; use one without slashes"),
    ("run.name=..", "run.name='..' cannot be a folder name"),
    ("run.name=''", "run.name='' cannot be a folder name"),
    (f"recompute.layer_ids=[{10**400}]", "needs more than 64 bits"),
    (f"checkpoint.resume_from={'y' * 300}", "cannot be a file name; use at most 255 bytes between slashes"),
    (f"launch.endpoint=node0:{'1' * 5000}", "must be host:port with a port from"),
]
ENDPOINTS = ("node0", ":29500", "node0:0", "node0:65536", "node0:\u00b2", "a/b:29500", "node0:+1")
RULES += [(f"launch.endpoint={t}", f"={ascii(t)[1:-1]} must be host:port with a port") for t in ENDPOINTS]
STAGES = {"4": "4", "most": "'most'", '"1"': "'1'", "true": "True", "1.0": "1.0", "[1]": "[1]"}
RULES += [
    (f"moe.sync_free_stage={text}", f"moe.sync_free_stage={shown} must be auto, 0, 1, 2 or 3")
    for text, shown in STAGES.items()
]
SLOTS = " must be auto, or 1 to 4, the experts that a rank owns"
RULES += [(f"REPLICAS moe.replica_slots={n}", f"moe.replica_slots={n!r}{SLOTS}") for n in (0, 5, "few")]
FINE = """
precision.fp8=blockwise compile.enabled=true precision.fp8_products=[attn,mlp,shared_experts]
precision.fp8=blockwise compile.enabled=true model.num_layers=2 model.num_dense_layers=2 model.mtp_depth=0
precision.fp8=mxfp8 compile.enabled=true model.hidden_size=128 model.expert_ffn_size=96
launch.nproc=4 parallel.tp=4 train.global_batch_size=4
launch.nproc=8 parallel.tp=2 train.global_batch_size=16
launch.nproc=2 parallel.tp=4
launch.fake_world=8 launch.nproc=4 launch.nodes=2
optim.lr=3.4e38 optim.eps=1.2e-38 optim.weight_decay=0.0 optim.beta1=0.0 optim.beta2=0.99999994
train.epochs=0.5 optim.schedule=wsd optim.warmup_steps=999 train.steps=1000 profile.steps=[2000]
train.tokens=1e9 profile.steps=[2000]
data.source=files data.paths=[a,b] data.tokenizer=t data.weights=[7,0.5]
data.document_mask=true parallel.cp=2
data.document_mask=true data.source=synthetic data.document_length=9
SYMM launch.nproc=8 launch.nodes=2
SYMM launch.nproc=16 launch.nodes=1
SYMM launch.nproc=8
VENDOR moe.dispatcher=deepep parallel.ep=8
VENDOR moe.dispatcher=deepep parallel.ep=2 model.hidden_size=7936 model.top_k=32 graph.scope=full_iteration
VENDOR moe.dispatcher=turbo parallel.ep=4 model.hidden_size=2880 model.top_k=33
VENDOR moe.dispatcher=turbo parallel.ep=8 model.hidden_size=8192 graph.scope=layer
VENDOR moe.dispatcher=nvshmem parallel.ep=8 parallel.etp=2 precision.compute=fp32 launch.nproc=16
VENDOR moe.dispatcher=nvshmem parallel.ep=2 graph.scope=moe moe.sync_free_stage=3
model.num_experts=0 model.num_layers=7 moe.balance=none moe.sync_free_stage=0 graph.scope=partial
model.num_experts=0 model.num_dense_layers=4 precision.fp8=rowwise compile.enabled=true
"""
"""Batches over data-parallel ranks alone, ranks of nodes that are counted later, ends of fp32, vendors."""


BARE = re.compile(rf"(?<![\w.])({'|'.join(name for keys in schema().values() for name in keys)})=")


def broken(words: str) -> list[str]:
    for name, meaning in SHORT.items():
        words = words.replace(name, meaning)
    of_cpu = ["train.micro_batch_size=4", "graph.scope=none", "pipeline.ep_overlap=false"]  # later words win
    found = OmegaConf.to_object(OmegaConf.merge(schema(), OmegaConf.from_dotlist([*of_cpu, *words.split()])))
    if found.moe.dispatcher == "auto":  # as a CPU decides
        found.moe.dispatcher = "local" if found.parallel.ep * found.parallel.etp == 1 else "alltoall"
    return violations(found)


@pytest.mark.parametrize("words, message", RULES, ids=[words[:80] for words, _ in RULES])
def test_a_broken_rule_is_the_one_violation_and_says_what_would_do(words, message):
    found = broken(words)
    assert len(found) == 1 and message in found[0] and not BARE.search(found[0])


def test_what_breaks_no_rule_is_taken():
    assert [(words, found) for words in ["", *FINE.strip().splitlines()] if (found := broken(words))] == []


OF_EXPERTS = """
model.top_k=3 model.expert_ffn_size=8 model.shared_ffn_size=0 model.score_function=sigmoid
model.shared_gate=true model.input_scaling=true model.moe_every=2
model.softmax_after_topk=true model.renormalise=true model.routed_scale=2.0 model.num_groups=2
model.expert_bias=true model.swiglu_limit=7.0 model.router_bias=true
model.topk_groups=2 model.group_score=topk_sum model.selection_bias=true model.bias_update_rate=0.1
model.aux_loss=none model.aux_loss_coef=0.1 model.z_loss_coef=0.1 model.mtp_depth=1 model.mtp_loss_weight=0.1
moe.force_balance=true moe.expert_load=hot_rank moe.experts=te moe.dispatcher=deepep moe.transport=pull
moe.dispatch_dtype=bf16 moe.receive_budget=2.0 moe.balance=replicas moe.replica_slots=2 moe.replica_keep=true
moe.sync_free_stage=3 parallel.ep=2 parallel.etp=2 pipeline.ep_overlap=true
"""


@pytest.mark.parametrize("word", OF_EXPERTS.split())
def test_a_key_of_moe_layers_that_a_dense_model_is_given_has_one_line(word):
    key = word.partition("=")[0]
    run = OmegaConf.to_object(
        OmegaConf.merge(schema(), OmegaConf.from_dotlist(["model.num_experts=0", word]))
    )
    said = f"{word} is for MoE layers, and a model of model.num_experts=0 has none; leave it out"
    assert violations(run, {key}) == [said]
    in_preset = key.startswith("model.") and key != "model.mtp_depth"
    assert violations(run) == ([] if in_preset else [said])


def test_every_key_of_moe_layers_is_among_them():
    keys = {word.partition("=")[0] for word in OF_EXPERTS.split()}
    moe = {f"moe.{name}" for name in schema().moe}
    assert keys == moe | {f"model.{name}" for name in EXPERT_KEYS} | {
        "parallel.ep", "parallel.etp", "pipeline.ep_overlap"
    }  # fmt: skip


@pytest.mark.parametrize("dispatcher", ["deepep", "turbo"])
def test_the_advice_leads_no_group_of_several_nodes_into_another_refusal(dispatcher):
    nodes = "parallel.ep=16 launch.nproc=8 launch.nodes=2 launch.endpoint=node0:29500"
    (message,) = broken(f"VENDOR moe.dispatcher={dispatcher} {nodes}")
    advised = re.findall(r"moe\.dispatcher=(\w+)", message.partition("; use ")[2])
    assert advised
    assert [found for to in advised if (found := broken(f"VENDOR moe.dispatcher={to} {nodes}"))] == []
