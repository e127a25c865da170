"""vLLM's interfaces, as each supported release has them, against what kvlake expects of them.

The installed release is read from its source again; the others by what was recorded of theirs. A
failure names what moved. How to take a new release in: `docs/evidence/testing.md`.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from connector.identity.namespace import (
    ADAPTER_SETTINGS,
    KERNEL_SETTINGS,
    MEDIA_SETTINGS,
    MODEL_SETTINGS,
)
from connector.options import VLLM_OFFLOADING_OPTIONS
from tests import places
from tests.contract.base import BASE_CLASS, LEFT_ALONE, OVERRIDDEN
from tests.contract.calls import SCHEDULER, WORKER, departure
from tests.contract.installed import installed
from tests.contract.reading import Sources
from tests.contract.surface import MANIFESTS, USED, dump, moved, record, recorded

pytestmark = pytest.mark.promise("vllm-interfaces")

SUPPORTED = ("0.31.0", "0.32.0", "0.33.0")
MADE_FROM = {
    "SupportsHMA",
    "KVConnectorMetadata",
    "KVConnectorWorkerMetadata",
    "KVConnectorStats",
    "KVConnectorPromMetrics",
    "OffloadingManager",
    "OffloadingWorker",
    "TieringOffloadingSpec",
    "SecondaryTierManager",
}
"""Classes of vLLM that kvlake's are made from, beside the connector's base class."""
INHERITED = {"TieringOffloadingSpec": ("CPUOffloadingSpec", "OffloadingSpec")}
"""The base classes of those in other modules of vLLM."""
READ_OF_OTHERS = {
    "rope_parameters": "of a configuration of transformers",
    "max_position_embeddings": "of a configuration of transformers",
    "_commit_hash": "of a configuration of transformers, before 5.19",
    "initial": "of a revision of huggingface_hub",
    "resolved": "of a revision of huggingface_hub",
    "name": "of an enumeration's member, or one of the settings that the test names",
    "f'_is_{name}_supported": "of torch",
    "tensorizer_config_dict": "of LoRARequest in vLLM 0.31, and in no later release",
}
"""What the connector reads by getattr and vLLM does not own, or no longer, and whose it is."""


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return record(Sources(installed()))


def test_the_installed_release(here: dict[str, Any]) -> None:
    lines = moved(here)
    assert not lines, f"vLLM {here['version']} moved:\n" + "\n".join(lines)


def test_what_was_recorded_of_the_installed_release_is_true(here: dict[str, Any]) -> None:
    known = recorded(here["version"])
    assert known is not None, "run: python -m tests.contract"
    assert dump(here) == dump(known), (
        "the records are of another surface; see docs/evidence/testing.md"
    )


@pytest.mark.parametrize("version", SUPPORTED)
def test_a_recorded_release(version: str) -> None:
    manifest = recorded(version)
    assert manifest is not None, f"{version} was never recorded; see docs/evidence/testing.md"
    assert manifest["version"] == version
    # Recorded with this surface, not with an older one that asked for less.
    assert manifest["symbols"].keys() == {BASE_CLASS, *USED}, (
        "record it again; see docs/evidence/testing.md"
    )
    lines = moved(manifest)
    assert not lines, f"vLLM {version} moved:\n" + "\n".join(lines)


def test_no_other_release_is_recorded() -> None:
    assert {path.stem for path in MANIFESTS.glob("*.json")} == set(SUPPORTED)


def test_every_override_is_in_the_surface() -> None:
    members = Sources(places.ROOT).members(
        f"{places.find('KVLakeConnector').module_name}:KVLakeConnector"
    )
    assert members is not None
    ours = {name for name in members if not name.startswith("_")}
    assert ours <= {*OVERRIDDEN, "request_finished_all_groups"}
    assert not {*OVERRIDDEN} & {*LEFT_ALONE}
    assert not ours & {*LEFT_ALONE}


def test_every_class_of_vllms_is_gone_through() -> None:
    """A new method in a base class of ours requires a decision."""
    symbols = {symbol.partition(":")[2]: symbol for symbol in USED}
    found: set[str] = set()
    for path in (places.ROOT / "connector").rglob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {
            alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
            for alias in node.names
        }
        for node in ast.walk(tree):
            bases = {ast.unparse(base) for base in getattr(node, "bases", ())} & imported
            for base in bases - {"KVConnectorBase_V1"}:
                assert isinstance(node, ast.ClassDef)
                found.add(base)
                line = [USED[symbols[name]] for name in (base, *INHERITED.get(base, ()))]
                assert all(used.left is not None for used in line), f"{base} has no table"
                ours = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
                known = {name for used in line for name in used.members}
                left = {name for used in line for name in used.left or {}} - known
                # The connector's other methods are of the base class, and in its table.
                if base != "SupportsHMA":
                    public = {name for name in ours if not name.startswith("_")}
                    assert public <= known, f"{node.name}: {public - known}"
                assert not ours & left, f"{node.name}: {ours & left} are not left alone"
    assert found == MADE_FROM


def test_what_is_read_with_a_default_is_in_the_surface() -> None:
    """A field that is gone would be taken for one that says nothing."""
    known = {name for used in USED.values() for name in used.members} | {*OVERRIDDEN}
    settings = {*MEDIA_SETTINGS, *MODEL_SETTINGS, *ADAPTER_SETTINGS, *KERNEL_SETTINGS}
    settings |= {"decode_context_parallel_size", "prefill_context_parallel_size"}
    assert settings <= known
    for path in (places.ROOT / "connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) not in (
                "getattr",
                "hasattr",
            ):
                continue
            name = ast.unparse(node.args[1]).removeprefix("'").removesuffix("'")
            assert name in known or name in READ_OF_OTHERS, f"{path.name}: {ast.unparse(node)}"


@pytest.mark.promise("unknown-options")
def test_what_vllms_offloading_reads_of_its_configuration_is_known() -> None:
    """Else an operator who sets it is told that it does nothing."""
    read: set[str] = set()
    vllm = installed() / "vllm"
    kv_offload = vllm / "v1/kv_offload"
    front = vllm / "distributed/kv_transfer/kv_connector/v1/offloading"
    paths = [*kv_offload.glob("*.py"), *(kv_offload / "cpu").glob("*.py"), *front.glob("*.py")]
    for path in (*paths, kv_offload / "tiering/spec.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("extra_config.get")
                and isinstance(node.args[0], ast.Constant)
            ):
                read.add(str(node.args[0].value))
    assert "cpu_bytes_to_use" in read
    assert read <= {*VLLM_OFFLOADING_OPTIONS}


def test_every_import_is_in_the_surface() -> None:
    """What the connector takes from vLLM's modules is looked after."""
    known = {symbol.partition(":")[2] for symbol in USED}
    # Re-exported there: `vllm.platforms` makes the platform when it is asked for.
    known |= {BASE_CLASS.partition(":")[2], "current_platform", "VllmConfig", "KVCacheEvent"}
    for path in (places.ROOT / "connector").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                names = {alias.name for alias in node.names}
                assert names <= known, f"{path.name} imports {names - known} of {node.module}"


class TestWhatMoves:
    """A release that moves something is told, by name."""

    @pytest.fixture
    def manifest(self) -> dict[str, Any]:
        known = recorded("0.32.0")
        assert known is not None
        return copy.deepcopy(known)

    def test_a_method_that_is_gone(self, manifest: dict[str, Any]) -> None:
        del manifest["symbols"][BASE_CLASS]["take_events"]
        assert moved(manifest) == [f"{BASE_CLASS}.take_events is gone, expected: ()"]

    def test_a_parameter_more_of_what_is_overridden(self, manifest: dict[str, Any]) -> None:
        manifest["symbols"][BASE_CLASS]["take_events"] = "(limit=)"
        assert moved(manifest) == [f"{BASE_CLASS}.take_events is (limit=), expected: ()"]

    def test_a_parameter_more_of_what_is_called(self, manifest: dict[str, Any]) -> None:
        pool = "vllm.v1.core.block_pool:BlockPool"
        manifest["symbols"][pool]["touch"] = "(blocks, times=)"
        assert moved(manifest) == []
        manifest["symbols"][pool]["touch"] = "(blocks, times)"
        assert moved(manifest) == [f"{pool}.touch is (blocks, times), expected: (blocks)"]

    def test_a_new_method(self, manifest: dict[str, Any]) -> None:
        manifest["symbols"][BASE_CLASS]["before_sleep"] = "(level)"
        (line,) = moved(manifest)
        assert line.startswith(f"{BASE_CLASS}.before_sleep is new: (level)")

    @pytest.mark.parametrize("kind", ["(keys)", "abstract (keys)"])
    def test_a_new_method_of_what_ours_are_made_from(
        self, manifest: dict[str, Any], kind: str
    ) -> None:
        """An abstract one makes ours impossible to make."""
        for symbol in (symbol for symbol, used in USED.items() if used.left is not None):
            again = copy.deepcopy(manifest)
            again["symbols"][symbol]["prefetch"] = kind
            (line,) = moved(again)
            assert line.startswith(f"{symbol}.prefetch is new: {kind}")

    def test_a_parameter_more_of_what_ours_override(self, manifest: dict[str, Any]) -> None:
        worker = "vllm.v1.kv_offload.base:OffloadingWorker"
        ours = "abstract (job_id, src_spec, dst_spec, expedited=)"
        # 0.33 has it, and ours takes it; a release may be without.
        manifest["symbols"][worker]["submit_load"] = ours
        assert moved(manifest) == []
        more = ours.replace("expedited=", "expedited=, urgent=")
        manifest["symbols"][worker]["submit_load"] = more
        assert moved(manifest) == [f"{worker}.submit_load is {more}, expected: {ours}"]

    def test_what_was_left_alone_and_is_gone(self, manifest: dict[str, Any]) -> None:
        tier = "vllm.v1.kv_offload.tiering.base:SecondaryTierManager"
        del manifest["symbols"][tier]["get_stats"]
        assert moved(manifest) == [f"{tier}.get_stats is gone, which was left alone"]

    def test_a_field_a_class_a_module(self, manifest: dict[str, Any]) -> None:
        request = "vllm.v1.request:Request"
        del manifest["symbols"][request]["resumable"]
        manifest["symbols"]["vllm.plugins:DEFAULT_PLUGINS_GROUP"] = None
        assert moved(manifest) == [
            f"{request}.resumable is gone, expected: attribute",
            "vllm.plugins:DEFAULT_PLUGINS_GROUP is gone",
        ]

    def test_another_order(self, manifest: dict[str, Any]) -> None:
        free = "vllm.v1.core.sched.scheduler:Scheduler._free_request"
        manifest["calls"][free] = "calls _free_blocks, _connector_finished"
        (line,) = moved(manifest)
        assert line.startswith(f"{free} does not call _free_blocks")

    def test_what_only_later_releases_have(self, manifest: dict[str, Any]) -> None:
        manifest["version"] = "0.33.0"
        lines = moved(manifest)
        later = ("sleep", "_kv_caches", "config_info", "lock", "on_reset_flushed", "_text_lora_")
        assert all(any(word in line for word in later) for line in lines)
        assert len(lines) == 3 + 9

    def test_a_member_that_came_later(self, manifest: dict[str, Any]) -> None:
        tier = "vllm.v1.kv_offload.tiering.base:SecondaryTierManager"
        del manifest["symbols"][tier]["cache_hit_source"]
        assert moved(manifest) == [f"{tier}.cache_hit_source is gone, expected: attribute"]
        manifest["version"] = "0.31.0"
        assert moved(manifest) == []


def test_source_is_read_without_importing(tmp_path: Path) -> None:
    """A release that cannot be imported here, and all that a class can hold."""
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "_version.py").write_text("__version__ = version = '9.1.0+cuda'\n")
    (package / "__init__.py").write_text("raise RuntimeError('no driver')\n")
    (package / "part.py").write_text(
        "import torch_that_is_not_there\n"
        "LIMIT: int = 3\n"
        "class Base:\n"
        "    field: int\n"
        "    def __init__(self, a, *rest, b=1, **more):\n"
        "        self.kept: int = a\n"
        "class Sub(Base):\n"
        "    @property\n"
        "    def size(self): return self.one() or [self.two(), 1]\n"
        "    @classmethod\n"
        "    @abstractmethod\n"
        "    async def make(cls, x, /, y=2): ...\n"
    )
    sources = Sources(tmp_path)
    assert sources.version == "9.1.0"
    assert sources.members("vllm.part:LIMIT") == {"": "attribute"}
    assert sources.members("vllm.part:Sub") == {
        "field": "attribute",
        "__init__": "(a, *rest, b=, **more)",
        "kept": "attribute",
        "size": "property",
        "make": "abstract class (x, y=)",
    }
    assert sources.calls("vllm.part:Sub.size", ("two", "one")) == "calls one, two"
    assert sources.members("vllm.part:Gone") is None
    assert sources.members("vllm.gone:Sub") is None
    assert sources.calls("vllm.part:Sub.gone", ("one",)) is None


def test_the_command_says_what_moved(tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "_version.py").write_text("__version__ = version = '0.0.1'\n")
    code = (
        "import sys, pathlib; from tests.contract import surface, __main__ as command;"
        f"command.MANIFESTS = pathlib.Path({str(tmp_path)!r});"
        f"sys.argv = ['x', {str(tmp_path)!r}]; sys.exit(command.main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=places.ROOT
    )
    assert done.returncode == 1, done.stderr
    assert f"{BASE_CLASS} is gone" in done.stdout
    assert (tmp_path / "0.0.1.json").is_file()


class TestOrderOfCalls:
    STEP = "get_num_new_matched_tokens update_state_after_alloc build_connector_meta "
    OUTPUT = "update_connector_output get_kv_connector_stats take_events "

    def test_what_keeps_it(self) -> None:
        calls = f"bind_gpu_block_pool on_new_request {self.STEP}request_finished_all_groups "
        assert departure(calls + self.OUTPUT + self.STEP * 2, SCHEDULER) == ""

    def test_what_leaves_it_is_shown(self) -> None:
        late = "bind_gpu_block_pool get_external_cache_hit_sources build_connector_meta "
        assert departure(late, SCHEDULER) == (
            "bind_gpu_block_pool <here> get_external_cache_hit_sources build_connector_meta"
        )
        told_late = "bind_gpu_block_pool take_events update_connector_output build_connector_meta "
        assert "<here> update_connector_output" in departure(told_late, SCHEDULER)
        early = "register_kv_caches get_transfer_results wait_for_save "
        assert "<here> get_transfer_results" in departure(early, WORKER)
