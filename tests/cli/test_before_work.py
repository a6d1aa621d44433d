"""Options that name files, folders and tokenizers are refused before the work whose result they are for, or whose input they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.export import LAUNCHERS
from penstock.cli.main import run

PLAN = str(Path(__file__).parents[2] / "examples" / "plans" / "gpt-1.3b-pp4.json")
SEARCH = "search --model gpt-small --cluster 2xcpu --global-batch 8"
PREPARE = "prepare-data texts.jsonl --workers 1"
FIND, LOOK = "penstock.search.search", "penstock.data.text.prepare.look"


@pytest.mark.parametrize(
    ("command", "work", "message"),
    [
        (f"{SEARCH} --out folder", FIND, "--out: 'folder' cannot be written: it is a directory"),
        (f"{SEARCH} --export megatron:folder", FIND, "--export: 'folder' cannot be written"),
        (f"{SEARCH} --export torchtitan:recipe.py", FIND, "torchtitan has no model like 'gpt-small'"),
        (f"{SEARCH.replace('gpt-small', 'resnet-50')} --export megatron:flags.txt", FIND, "Megatron-LM has no model like 'resnet-50'"),
        (f"{SEARCH.replace('cpu', 't4')} --for runtime --schedules pipedream --precision fp16", FIND, "fp16's loss scale is one for all"),
        (f"{SEARCH} --export huggingface:weights", FIND, "a plan has no weights"),
        (f"{SEARCH} --export nowhere:file", FIND, "there is no export to 'nowhere'"),
        (f"{SEARCH} --lengths texts.jsonl --out folder", "penstock.batching.lengths.read_lengths", "'folder' cannot be written"),
        ("pareto --model gpt-small --cluster 1xp4d.24xlarge --global-batch 8 --out texts.jsonl", "penstock.search.offers", "is not"),
        (f"{PREPARE} --tokenizer nowhere --out data", LOOK, "tokenizer 'nowhere' does not exist"),
        (f"{PREPARE} --tokenizer texts.jsonl --out data", LOOK, "texts.jsonl"),
        (f"{PREPARE} --train-tokenizer 300 --end-token <end> --out data", LOOK, "not with '<end>'"),
        (f"{PREPARE} --train-tokenizer 300 --out full", LOOK, "--out: 'full' exists and is not an empty folder"),
        (f"{PREPARE} --train-tokenizer 300 --out texts.jsonl", LOOK, "--out: 'texts.jsonl' cannot be written"),
        (f"{PREPARE} --image-size 32 --out data", LOOK, "--image-size: for images; what is given are texts. Leave it out"),
        (f"{PREPARE} --vocab-size 99 --out data", LOOK, "--vocab-size: for HDF5 shards; what is given are texts"),
        ("prepare-data images --fields text=body --out data", "penstock.data.images.prepare_images", "--fields: for texts; what is given"),
        ("batch --lengths texts.jsonl --plan PLAN --out folder", "penstock.batching.lengths.read_lengths", "'folder' cannot be written"),
        ("simulate PLAN --trace folder", "penstock.plans.schema.read_plan", "--trace: 'folder' cannot be written"),
        ("simulate PLAN --figure drawing.bmp", "penstock.plans.schema.read_plan", "drawing.bmp"),
        ("train PLAN --data data --steps 1 --out texts.jsonl", "penstock.plans.schema.read_plan", "--out: 'texts.jsonl' cannot be written"),
        ("profile --model gpt-small --out folder", "penstock.profiling.run.Profiler.open", "--out: 'folder' cannot be written"),
        ("import module:net.py:make --out folder", "penstock.files.write_json", "--out: 'folder' cannot be written"),
        ("export PLAN --to slurm:folder", "penstock.plans.schema.read_plan", "--to: 'folder' cannot be written"),
        ("store start --out folder", "penstock.stores.server.start_redis", "--out: 'folder' cannot be written"),
    ],
)
def test_it_is_told_at_once(
    command: str, work: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("full").mkdir()
    Path("full/kept").touch()
    Path("images/cats").mkdir(parents=True)
    Path("images/cats/one.png").touch()
    Path("texts.jsonl").write_text('{"text": "a"}\n')
    before = sorted(tmp_path.rglob("*"))

    def begun(*given: object, **named: object) -> None:
        raise AssertionError(f"{work} was called")

    monkeypatch.setattr(work, begun)
    assert run([PLAN if word == "PLAN" else word for word in command.split()]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "command",
    [
        "search --model @.yaml --cluster 2xcpu --global-batch 8 --out @.yaml",
        "search --model gpt-small --cluster @.yaml --global-batch 8 --out @.yaml",
        f"{SEARCH} --costs profile:@ --out @",
        f"{SEARCH} --lengths @ --out @",
        f"{SEARCH} --lengths @.2.json --out @.json",
        f"{SEARCH} --costs profile:@.search.json --out @.json",
        f"{SEARCH} --lengths @ --export slurm:@",
        f"{SEARCH} --out @.json --export megatron:@.json",
        f"{SEARCH} --out @.json --export megatron:@.search.json",
        f"{SEARCH} --out @.json --export megatron:@.2.json",
        "search --model module:@.py:make --cluster 2xcpu --global-batch 8 --out @.py",
        "batch --lengths @ --plan PLAN --out @",
        "batch --lengths lengths.csv --plan @ --out @",
        "batch --lengths lengths.csv --plan PLAN --costs profile:@ --out @",
        "simulate @ --trace @",
        "simulate @.svg --figure @.svg",
        "simulate PLAN --lengths @ --trace @",
        "simulate PLAN --batch @ --trace @",
        "simulate PLAN --costs profile:@ --trace @",
        "simulate PLAN --trace @.svg --figure @.svg",
        "simulate PLAN --trace @.svg --figure link.svg",
        "simulate PLAN --trace @.svg --figure ./folder/../@.svg",
        "report @ --out @",
        "report PLAN @ --out @",
        "report PLAN --against @ --out @",
        "report link.svg --out @.svg",
        "trace run --out run/plan.json",
        "report run --out run/plan.json",
        "import module:@.json:make --out @.json",
        "import aceso:@.json --model gpt-small --cluster 2xcpu --out @.json",
        "import fasop:@.json --model gpt-small --cluster 2xcpu --global-batch 8 --out @.json",
        "import dynpipe:@.json --model gpt-small --cluster 2xcpu --global-batch 8 --out @.json",
        "import dynpipe:map.json --partition @.json --model gpt-small --cluster 2xcpu --global-batch 8 --out @.json",
        "import aceso:PLAN --model @.json --cluster 2xcpu --out @.json",
        *(f"export @ --to {system}:@" for system in ("megatron", "torchtitan", "deepspeed", "aceso", "fasop", *LAUNCHERS)),
        "export topology.json --to dynpipe:.",
        "profile --model @ --out @",
        "profile --model gpt-small --merge @ --out @",
        "store start --out @",
    ],
)  # fmt: skip
def test_no_file_is_read_and_written(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every verb that writes a file, that file being each of its inputs, or another output."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("run").mkdir()
    Path("lengths.csv").write_text("length\n5\n9\n")
    for name in ("@", "@.yaml", "@.py", "@.svg", "@.json", "@.2.json", "@.search.json", "run/plan.json", "topology.json"):
        Path(name.replace("@", "both")).write_bytes(Path(PLAN).read_bytes())
    Path("map.json").write_text('{"module_to_stage_map": [0, 0], "stage_to_rank_map": {"0": [0]}}')
    Path("link.svg").symlink_to("both.svg")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert run([PLAN if word == "PLAN" else word.replace("@", "both") for word in command.split()]) == 2
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
    said = capsys.readouterr().err
    assert said.count("error:") == 1
    if command.split()[0] not in ("profile", "store"):  # which go on with what is theirs, and refuse what is not
        assert "would be overwritten" in said or "writes something else" in said


def test_names_are_free_again_for_the_next_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lengths.csv").write_text("length\n5\n9\n")
    assert run(["batch", "--lengths", "lengths.csv", "--plan", PLAN, "--budget-steps", "0", "--out", "batch.json"]) == 0
    assert run(["simulate", PLAN, "--batch", "batch.json", "--trace", "t.json"]) == 0
    assert run(["simulate", PLAN, "--trace", "/dev/null", "--json"]) == 0


def test_a_search_whose_plan_cannot_be_exported_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether FASOP can express a plan is known only when there is one."""
    out = tmp_path / "plan.json"
    asked = [*SEARCH.split(), "--top", "1", "--out", str(out), "--export", f"fasop:{tmp_path / 'fasop.csv'}"]
    assert run(asked) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "FASOP cannot express" in said and f"its plans are in '{out}'" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.json", "plan.search.json"]
