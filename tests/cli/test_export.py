"""`penstock export`: what it writes, what it says, and with which status it leaves."""

from __future__ import annotations

import ast
import json
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from megatron_flags import megatron_flags

from penstock.cli.export import LAUNCHERS, TARGETS
from penstock.cli.main import run
from penstock.plans.build import uniform_plan
from penstock.plans.plan import Plan
from penstock.plans.schema import plan_from_dict, read_plan, write_plan
from penstock.systems.aceso.files import read_aceso_plan
from penstock.systems.aceso.plans import from_plan
from penstock.systems.fasop.rows import read_fasop_rows

EXAMPLES = Path(__file__).parents[2] / "examples" / "plans"


@pytest.fixture
def gpt(tmp_path: Path) -> Path:
    """A plan that everything but torchtitan can express."""
    return written(tmp_path, uniform_plan("gpt-350m", "4xv100-32gb", pp=2, tp=2, global_batch=64, micro_batch=4, precision="fp16"))


def written(tmp_path: Path, plan: Plan) -> Path:
    write_plan(tmp_path / "plan.json", plan)
    return tmp_path / "plan.json"


def test_every_target(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in ("megatron", "deepspeed", "aceso", "fasop"):
        assert run(["export", str(gpt), "--to", f"{target}:{tmp_path / 'new' / target}"]) == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / target}\n"
    assert "--tensor-model-parallel-size 2" in (tmp_path / "new" / "megatron").read_text()
    assert json.loads((tmp_path / "new" / "deepspeed").read_text())["gradient_accumulation_steps"] == 16
    assert read_aceso_plan(tmp_path / "new" / "aceso").num_gpus == (2, 2)
    assert [row.partition for row in read_fasop_rows(tmp_path / "new" / "fasop")] == [(13, 13)]


def test_dynpipe_gets_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path, uniform_plan("vgg16", "3xv100-16gb", pp=3, global_batch=96, micro_batch=8, schedule="pipedream"))
    assert run(["export", str(plan), "--to", f"dynpipe:{tmp_path / 'new' / 'plan'}"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / 'plan'}\n"
    assert sorted(path.name for path in (tmp_path / "new" / "plan").iterdir()) == ["partition.json", "topology.json"]
    assert json.loads((tmp_path / "new" / "plan" / "topology.json").read_text()) == {
        "module_to_stage_map": [0, 1, 2, 2],
        "stage_to_rank_map": {"0": [0], "1": [1], "2": [2]},
        "stage_to_depth_map": {"0": 2, "1": 1, "2": 0},
    }
    assert run(["export", str(plan), "--to", f"dynpipe:{plan}"]) == 2  # a file
    assert "is not a directory" in capsys.readouterr().err
    assert read_plan(plan).num_stages == 3


def test_launch_files_name_the_plan(gpt: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for target in LAUNCHERS:
        assert run(["export", str(gpt), "--to", f"{target}:{tmp_path / 'new' / target}"]) == 0
        assert capsys.readouterr().out == f"wrote {tmp_path / 'new' / target}\n"
    for target in ("slurm", "torchrun"):
        assert f"(-m penstock train {gpt.resolve()})" in (tmp_path / "new" / target).read_text()
    objects = list(yaml.safe_load_all((tmp_path / "new" / "kubernetes").read_text()))
    carried = next(one for one in objects if one["kind"] == "ConfigMap")["data"]["plan.json"]
    assert plan_from_dict(json.loads(carried), "it") == read_plan(gpt)


def test_weights_of_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from chain_pieces import chain_pieces
    from small_models import SIZES, small_model

    from penstock.models.modules import build_chain
    from penstock.models.modules.hf_weights import export_hf_weights, read_safetensors
    from penstock.runtime.checkpoints.writer import CheckpointWriter

    model = small_model("llama")
    chain = build_chain(model)
    writer = CheckpointWriter(tmp_path / "saves")
    writer.save(1, chain_pieces(chain, owned=True), {"model": {"family": "llama", **SIZES["llama"]}})
    writer.wait()
    assert run(["export", str(tmp_path / "saves"), "--to", f"huggingface:{tmp_path / 'out'}"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'out'}\n"
    wanted, found = export_hf_weights(chain, model, copies=False), read_safetensors(tmp_path / "out")
    assert set(found) == set(wanted) and all((found[name] == wanted[name]).all() for name in wanted)
    writer.save(2, chain_pieces(chain, owned=True), {})
    writer.wait()
    assert run(["export", str(tmp_path / "saves"), "--to", f"huggingface:{tmp_path / 'new'}"]) == 2
    assert "does not say which model" in capsys.readouterr().err
    assert run(["export", str(tmp_path), "--to", f"huggingface:{tmp_path / 'new'}"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err


def test_torchtitan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = written(tmp_path, uniform_plan("llama-8b", "4xh100-80gb", pp=2, replicas=2, zero=1, global_batch=64, micro_batch=4))
    assert run(["export", str(plan), "--to", f"torchtitan:{tmp_path / 'recipe.py'}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"plan": str(plan), "system": "torchtitan", "path": str(tmp_path / "recipe.py")}
    compile((tmp_path / "recipe.py").read_text(), "recipe.py", "exec")


@pytest.mark.parametrize("target", TARGETS)
def test_what_cannot_be_expressed_leaves_no_file(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "old").write_text("as it was")
    assert run(["export", str(EXAMPLES / "llama-8b-mixed.json"), "--to", f"{target}:{tmp_path / 'old'}"]) == 2
    told = capsys.readouterr()
    reasons = ("cannot express", "has no model like", "none of Aceso", "is not a directory")
    assert told.out == "" and any(reason in told.err for reason in reasons)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "as it was"


@pytest.mark.parametrize(
    ("to", "told"),
    [
        ("megatrom:x", "there is no export to 'megatrom'. Did you mean 'megatron'?"),
        ("pbs:x", "there is no export to 'pbs'. Known: aceso, deepspeed, dynpipe, fasop, huggingface, kubernetes, megatron, "),
        ("slurm", "slurm:PATH was expected, as in slurm:train.sbatch"),
        ("megatron", "megatron:PATH was expected, as in megatron:flags.txt"),
        ("fasop:", "fasop:PATH was expected, as in fasop:rows.csv"),
        ("", "there is no export to ''"),
        ("deepspeed:/", "is a directory"),
        ("dynpip:x", "Did you mean 'dynpipe'?"),
        ("dynpipe:", "dynpipe:PATH was expected, as in dynpipe:folder"),
    ],
)
def test_wrong_targets(to: str, told: str, gpt: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(gpt), "--to", to]) == 2
    assert told in capsys.readouterr().err


def test_a_refusal_tells_of_plans_that_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a model that the system has; of another no plan would do."""
    told = {}
    for model in ("llama-8b", "gpt-1.3b"):
        plan = uniform_plan(model, "2xa100-80gb", global_batch=8, micro_batch=1, pp=2, schedule="zero-bubble")
        write_plan(tmp_path / "plan.json", plan)
        assert run(["export", str(tmp_path / "plan.json"), "--to", f"torchtitan:{tmp_path / 'recipe.py'}"]) == 2
        told[model] = " ".join(capsys.readouterr().err.split())
    assert "`penstock search --for torchtitan` finds plans" in told["llama-8b"] and "--for" not in told["gpt-1.3b"]


def test_wrong_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", str(tmp_path / "none.json"), "--to", f"megatron:{tmp_path / 'x'}"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert run(["export", str(EXAMPLES / "gpt-1.3b-pp4.json")]) == 2  # no --to


def test_a_plan_over_imported_tables(small_tables: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan names a chain of the tables that its costs come from."""
    tables = small_tables / "aceso"
    from penstock.systems.aceso.plans import to_plan
    from penstock.systems.aceso.tables import AcesoTables

    own = from_plan(uniform_plan("gpt-350m", "2xv100-32gb", pp=2, global_batch=64, micro_batch=4, precision="fp16"))
    model = AcesoTables.open(tables).model("gpt", "350M")
    plan = to_plan(own, model, model_ref=model.name, cluster_ref="2xv100-32gb", costs=f"aceso:{tables}")
    path = written(tmp_path, plan)
    assert run(["export", str(path), "--to", f"aceso:{tmp_path / 'a.json'}"]) == 0
    assert read_aceso_plan(tmp_path / "a.json") == own
    assert run(["export", str(path), "--to", f"megatron:{tmp_path / 'm.txt'}"]) == 2
    assert "Megatron-LM has no model like 'gpt_350M'" in capsys.readouterr().err


HOSTILE = (
    'x"""\nimport os\nos.mkdir("hacked")\n"""', "x\n--exit-on-missing-checkpoint\n$(mkdir hacked)", '\\"""\rmkdir hacked', "ends in \\",
    'ends in "', "`mkdir hacked`'; mkdir hacked; '", "x\u2028y\x85mkdir hacked\x0cz", "---\nkind: Pod", "{note} %s", "日本",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_model_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports are code: a model that somebody else described must not run with them."""
    monkeypatch.chdir(tmp_path)
    plan = uniform_plan("llama-8b", "4xh100-80gb", pp=2, replicas=2, zero=1, global_batch=64, micro_batch=4)
    plan = replace(plan, model={"base": "llama-8b", "name": name})
    write_plan("plan.json", plan)
    for target in ("megatron", "torchtitan", "deepspeed", *LAUNCHERS):
        assert run(["export", "plan.json", "--to", f"{target}:{target}.out"]) == 0
    texts = {path.stem: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.out")}
    recipe = ast.parse(texts["torchtitan"])
    assert [type(node) for node in recipe.body] == [ast.Expr, ast.ImportFrom, ast.Assign, ast.FunctionDef]
    assert (ast.get_docstring(recipe) or "").startswith(" ".join(name.split()) + " on 4 GPUs")
    flags = [line for line in texts["megatron"].split("\n") if not line.startswith("#")]
    assert shlex.split(" ".join(flags)) == megatron_flags(plan) and "".join(flags).isprintable()
    assert json.loads(texts["deepspeed"])["penstock"]["model"] == name
    assert [found["kind"] for found in yaml.safe_load_all(texts["kubernetes"])] == ["Service", "ConfigMap", "Job"]
    for launcher in ("slurm", "torchrun"):
        assert subprocess.run(["bash", "-n", f"{launcher}.out"], capture_output=True, check=True).stderr == b""
        # Every word of the name is in a comment, so that the rest is that of any other.
        code = [line for line in texts[launcher].split("\n") if not line.startswith("#")]
        assert "hacked" not in "".join(code) and "kind: Pod" not in code
