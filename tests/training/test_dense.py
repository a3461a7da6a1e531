"""Models without MoE layers: files of a run, projections of presets."""

import pytest

from graphmoe.command.hydra import compose_config, to_config
from graphmoe.command.words import composed
from graphmoe.model.sizes import count_parameters, state_bytes
from graphmoe.plan.costs.hardware import CARDS
from graphmoe.plan.plan import plan_of
from graphmoe.report.page import write_report
from graphmoe.run.files import EXPERT_LOADS_FILE
from graphmoe.training.auto import decided, machine_of
from graphmoe.training.dry_run import dry_run
from graphmoe.training.memory import memory_of_places
from tests.runs import TINY, assert_half_becomes_the_whole, command, metrics, summary, train_in

DENSE = ("model.num_experts=0", "model.attention=gqa", "model.num_kv_heads=1", "model.tie_embeddings=true")
OF_EXPERTS = {"router_entropy", "balance_loss", "z_loss", "load_max_over_mean", "rank_load"}


def test_a_run_resumes_bitwise_and_its_files_name_no_experts(tmp_path, caplog):
    caplog.set_level("INFO")
    train_in(tmp_path / "whole", *DENSE)
    assert_half_becomes_the_whole(tmp_path, *DENSE)
    rows = metrics(tmp_path / "whole")
    assert len(rows) == 9 and all(not OF_EXPERTS & row.keys() for row in rows)
    assert not (tmp_path / "whole" / EXPERT_LOADS_FILE).exists()
    assert "2 layers (2 dense)\n" in caplog.text and "dispatcher " not in caplog.text
    assert not [text for text in caplog.messages if text.startswith("experts ")]
    page = write_report(tmp_path / "whole").read_text()
    assert "No experts: the model has no MoE layer" in page and "Router entropy" not in page


def test_the_command_sums_up_a_dense_run_and_refuses_typed_keys_of_experts(tmp_path):
    run = command(tmp_path, *TINY, *DENSE, "hydra.run.dir=run", "log.report=true", "log.tensorboard=true")
    assert run.wait() == 2  # TINY's keys of experts are typed here
    lines = run.err.read_text().splitlines()
    keys = ["expert_ffn_size", "shared_ffn_size", "selection_bias"]
    refused = [line.removeprefix("error:").strip() for line in lines if "is for MoE layers" in line]
    assert [line.split("=")[0] for line in refused] == [f"model.{key}" for key in keys]
    words = [word for word in TINY if not any(f"model.{key}=" in word for key in keys)]
    run = command(tmp_path, *words, *DENSE, "hydra.run.dir=run", "log.report=true", "log.tensorboard=true")
    assert run.wait() == 0, run.err.read_text()
    assert "dead_experts" not in summary(tmp_path / "run") and (tmp_path / "run" / "report.html").exists()
    assert "model.expert_ffn_size=128 has no effect with model.num_experts=0" in run.err.read_text()


@pytest.mark.parametrize("name", ["llama3_8b", "qwen3_0_6b"])
def test_a_preset_is_projected_and_its_dry_run_holds_what_is_counted(name):
    words = (f"model={name}", "data=synthetic", "launch.fake_world=8", "parallel.tp=2", "model.num_layers=4")
    run = compose_config(*words, "train.micro_batch_size=1")
    assert (run.moe.dispatcher, run.moe.sync_free_stage, run.pipeline.ep_overlap) == ("local", 0, False)
    assert run.model.num_dense_layers == 4 and count_parameters(run.model)["total"]["routed_experts"] == 0
    plan, document = plan_of(run, 8), dry_run(run)
    wanted = state_bytes(run.model, plan.layout, bucket_mb=run.optim.bucket_mb)
    assert sorted(document["memory"]["state_bytes"].values()) == sorted(filter(None, wanted.values()))
    assert all("ep" not in call["axes"] and call["bytes"] for call in document["collectives"])
    (place,) = memory_of_places(plan, on_nvidia=True)
    held, peak = sum(wanted.values()), document["memory"]["peak_bytes"]
    assert held < place.total and held < peak == pytest.approx(place.total, rel=0.15)


def test_automatic_keys_of_gpus_are_those_of_a_model_without_exchange():
    words = ("model=llama3_2_1b", "data=synthetic", "launch.nproc=8", "train.global_batch_size=32")
    found = decided(to_config(composed(words)), machine_of(CARDS["h200"], 8))
    assert (found.moe.dispatcher, found.moe.balance.value) == ("local", "none")
    assert (found.graph.scope, found.pipeline.ep_overlap) == ("full_iteration", False)
    assert found.moe.sync_free_stage == 0
