from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from sidecar.cli.run.engine_command import own_chunk_tokens
from sidecar.config.model import Config, ConfigError, load, loads, schema, show
from sidecar.config.sections import RuntimeSettings
from sidecar.config.store import StoreSettings
from tests import places

CONFIGS = places.ROOT / "configs"


def problem(text: str, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loads(text, name="f.yaml", environment=environment)
    return str(caught.value)


def store_of(text: str, **environment: str) -> StoreSettings:
    store = loads(text, environment=environment).store
    assert store is not None
    return store


def test_no_file_and_an_empty_file_mean_the_defaults() -> None:
    assert load(None) == loads("") == loads("host:\nstore:\n") == Config()
    assert Config().store is None
    assert Config().host.size == 8 << 30


def test_sizes_and_durations_have_human_units() -> None:
    config = loads("host: {size: 512MiB}\nlimits: {lookup_wait: 250ms, drain_seconds_max: 2m}")
    assert config.host.size == 512 << 20
    assert config.limits.lookup_wait == 0.25
    assert config.limits.drain_seconds_max == 120


def test_on_and_off_are_accepted_as_yaml_booleans() -> None:
    store = store_of("store: {url: 's3://b', write: off, read: on}")
    assert (store.write, store.read) == ("off", "on")
    assert store_of("store: {url: 's3://b', write: through, read: 'off'}").read == "off"
    assert "'through', 'on_reuse', 'on_evict' or 'off'" in problem(
        "store: {url: 's3://b', write: on}"
    )


@pytest.mark.promise("bucket-bounds")
@pytest.mark.parametrize(
    ("limits", "most", "too_much"),
    [
        ("size_max: 1000", (1500, 10**9), (1501, 1)),
        ("objects_max: 100", (10**18, 150), (1, 151)),
        # A half of an odd limit is no whole object.
        ("objects_max: 3", (10**18, 4), (1, 5)),
        ("size_max: 1000, objects_max: 100", (1500, 150), (1501, 150)),
        ("size_max: 1000, objects_max: 100", (1500, 150), (1500, 151)),
    ],
)
def test_a_namespace_has_room_up_to_one_and_a_half_times_its_limit(
    limits: str, most: tuple[int, int], too_much: tuple[int, int]
) -> None:
    """Bytes and objects, as docs/how-to/object-stores.md has it."""
    store = store_of(f"store: {{url: 's3://b', {limits}}}")
    assert store.has_room(*most)
    assert not store.has_room(*too_much)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host:\n  sise: 8GiB", "f.yaml:2: host.sise: unknown setting; did you mean `size`?"),
        ("hots: {}", "f.yaml:1: hots: unknown setting; did you mean `host`?"),
        ("zzz: 1", "the top level takes chunk, copy, events, gpu"),
        ("copy: {thread: 2}", "copy.thread: unknown setting; did you mean `threads`?"),
        (
            "store:\n  url: s3://b\n  writes_inflight: 3",
            "f.yaml:3: store.writes_inflight: unknown setting; did you mean `writes_inflight_max`?",
        ),
    ],
)
def test_an_unknown_setting_names_its_path_and_the_nearest_one(text: str, said: str) -> None:
    assert said in problem(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "host: 5",
            "f.yaml:1: host: expected indented settings (after_stop, directory, numa, policy,",
        ),
        (
            "host:\n  size: lots",
            "f.yaml:2: host.size: 'lots' is not a size; write a number and one",
        ),
        ("host: {size: 1}", "greater than or equal to 1048576 (1MiB)"),
        (
            "runtime: {name: yes}",
            "runtime.name=True: input should be a valid string; YAML reads yes",
        ),
        ("runtime: {name: 7}", "YAML reads it as a number: put it in quotes"),
        ("host: {after_stop: yes}", "YAML reads yes, no, on and off as booleans"),
        ("events: {enabled: yup}", "write true or false"),
        (
            "store: {url: 's3://b', endpoint: 'localhost:9000'}",
            "store.endpoint: 'localhost:9000' has no scheme; write http://HOST:PORT",
        ),
        ("store: {url: 's3://b', proxy: 'me:secret@proxy'}", "store.proxy: 'proxy' has no scheme"),
        ("host: {size: -1}", "-1 is not a size; it must be a whole number"),
        ("host: {policy: lfu}", "host.policy='lfu': input should be 'density', 'lru' or 'fifo'"),
        ("host: {directory: shm}", "'shm' is a relative path; write an absolute one such as /shm"),
        ("host: {prefault: 3}", "host.prefault=3"),
        ("host: {after_stop: burn}", "host.after_stop='burn': input should be 'keep' or 'remove'"),
        ("integrity: {verify_loads: 1.5}", "integrity.verify_loads=1.5"),
        ("integrity: {verify_loads: most}", "integrity.verify_loads='most'"),
        ("integrity: {verify_writes: -0.1}", "integrity.verify_writes=-0.1"),
        ("chunk: {tokens: 0}", "chunk.tokens=0"),
        ("chunk: {tokens: true}", "chunk.tokens=True"),
        ("chunk: {tokens: 1.5}", "chunk.tokens=1.5"),
        ("http: {port: 70000}", "http.port=70000"),
        ("log: {level: loud}", "log.level='loud'"),
        ("limits: {lookup_wait: soon}", "limits.lookup_wait: 'soon' is not a duration"),
        ("limits: {lease_ttl: 1s}", "raise lease_ttl or lower load_deadline"),
        ("runtime: {name: a/b}", "'a/b' cannot name a directory"),
        ("store: {url: bucket}", "write a URL such as s3://bucket"),
        ("store: {url: /data}", "write a URL such as file:///data"),
        ("store: {url: 's3://b', prefix: ../up}", "must be a plain relative path"),
        ("store: {}", "f.yaml:1: store.url: must be given"),
    ],
)
def test_a_wrong_value_names_line_path_value_and_remedy(text: str, said: str) -> None:
    assert said in problem(text)


def test_every_problem_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        loads("host:\n  sise: 1\n  policy: x\nhttp: {port: -1}")
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host:\n  size: [", "f.yaml:2:"),
        ("host:\n\tsize: 1", "indent with spaces, not tabs"),
        ("log: level: info", "put the value in quotes, or check the indentation"),
        ("- host", "f.yaml:1: expected sections such as `host:`"),
        (
            "host: {size: 1GiB}\nhost: {size: 2GiB}",
            "f.yaml:2: host is given twice; keep one of the two",
        ),
        ("store: {url: ${BUCKET}}", 'a variable needs quotes: "${NAME}"'),
        ("a: !!python/object/apply:os.getcwd []", "f.yaml:1"),
        ("host: {size: 2001-13-45}", "a value is not what it looks like (month must be in 1..12)"),
        ("host: {size: !!int ''}", "put it in quotes"),
        ("host: {prefault: !!bool x}", "put it in quotes"),
        ("host: {size: !!timestamp 1}", "put it in quotes"),
        ("!!set {host}", "expected sections such as `host:`"),
        ("host: {directory: ~no-such-user/x}", "is a relative path"),
        ("host: {size: 2097152TiB}", "a whole number of bytes from 0 to 1048576TiB"),
        (f"host: {{size: '{'9' * 400}TiB'}}", "from 0 to 1048576TiB"),
        (f"store: {{url: s3://b, refresh_seconds: {'9' * 400}}}", "0 to 1000000000 s"),
    ],
)
def test_bad_yaml_is_reported_with_its_line(text: str, said: str) -> None:
    assert said in problem(text)


def test_a_key_that_is_given_twice_is_no_unquoted_variable() -> None:
    said = problem("store: {url: '${BUCKET:-s3://b}'}\nhost: {size: 1GiB}\nhost:\n")
    assert said == "f.yaml:3: host is given twice; keep one of the two"


def test_a_merged_mapping_may_be_overridden() -> None:
    text = "host: &a {size: 1GiB, policy: fifo}\ncopy: {threads: 2}\n"
    assert loads(text).host.policy == "fifo"
    config = loads("tenants: {named: {a: &a {id: '0000000000000001', host_max: 1GiB}, "
                   "b: {<<: *a, id: '0000000000000002'}}}")  # fmt: skip
    assert config.tenants.named["b"].host_max == 1 << 30


def test_a_missing_file_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "latin.yaml")


def test_the_end_of_a_line_is_no_part_of_a_variable() -> None:
    """A file that Kubernetes passes on as a variable has one."""
    text = "http: {token: '${TOKEN}'}\nlog: {level: '${LEVEL:-info}'}\n"
    config = loads(text, environment={"TOKEN": "0123456789abcdef\n", "LEVEL": "debug\r\n"})
    assert config.http.token is not None
    assert config.http.token.get_secret_value() == "0123456789abcdef"
    assert config.log.level == "debug"


@pytest.mark.parametrize("value", ["*S3cretToken0123456789", "!S3cretToken0123456789"])
def test_a_secret_that_means_something_in_yaml_is_not_repeated(value: str) -> None:
    said = problem(f"http:\n  token: {value}\n")
    assert "S3cret" not in said
    assert "put it in quotes" in said


def test_variables_are_expanded_in_strings() -> None:
    text = """
store:
  url: s3://${BUCKET}/${PREFIX:-kv}
  reads_inflight_max: ${READS:-7}
  storage_options: {key: "${KEY:-}", names: ["${BUCKET}", 3], literal: $$HOME $x}
http:
  port: ${PORT:-1234}
host:
  prefault: ${PREFAULT:-false}
"""
    config = loads(text, environment={"BUCKET": "b", "PREFIX": ""})
    assert config.store is not None
    assert config.store.url == "s3://b/kv"
    assert config.store.reads_inflight_max == 7
    assert config.store.storage_options == {"key": "", "names": ["b", 3], "literal": "$HOME $x"}
    assert config.http.port == 1234
    assert config.host.prefault is False


def test_an_unset_variable_is_reported_with_its_line_and_a_remedy() -> None:
    said = problem("store:\n  url: s3://${NO_SUCH}")
    assert "f.yaml:2: store.url: environment variable NO_SUCH is not set" in said
    assert "${NO_SUCH:-default}" in said
    assert "starts no variable" in problem("store: {url: 's3://${'}")


def test_secrets_are_never_shown() -> None:
    config = loads(
        """
store:
  url: s3://user:hunter2@bucket
  storage_options:
    key: hunter2
    secret: hunter2
    anon: false
    sas_token: hunter2
    client_kwargs: {endpoint_url: "https://u:hunter2@h/x?sig=hunter2", aws_session_token: hunter2}
    accounts: [{account_key: hunter2, name: visible}]
    connection_string: hunter2
    password: hunter2
"""
    )
    assert config.store is not None
    assert config.store.storage_options["secret"] == "hunter2"
    for text in (show(config), repr(config), str(config), repr(config.store)):
        assert "hunter2" not in text
    assert "visible" in show(config)
    assert "anon: false" in show(config)


@pytest.mark.parametrize(
    "text",
    [
        "store: {url: 's3://b', storage_options: hunter2}",
        "store: {url: 's3://b', storage_option: {secret: hunter2}}",
        "store: {url: 's3://u:hunter2@b', reads: 1}",
        "store: {secret: hunter2}",
        "store: {url: [hunter2], secret: 5}\nhttp: {port: x}",
    ],
)
def test_no_error_repeats_a_secret(text: str) -> None:
    assert "hunter2" not in problem(text)


def test_azure_containers_are_not_taken_for_users() -> None:
    assert "abfs://box@account" in show(loads("store: {url: 'abfs://box@account'}"))


def test_a_shown_configuration_reads_back_equal() -> None:
    config = loads("host: {size: 1536MiB}\nstore: {url: 's3://b', write: off}\ncopy: {threads: 2}")
    assert loads(show(config)) == config


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().http.port = 1  # type: ignore[misc]


def test_sockets_are_in_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = RuntimeSettings(directory=Path("/run/kvlake"), name="a")
    assert runtime.attach_path == Path("/run/kvlake/a/attach.sock")
    assert runtime.attach_path.parent == runtime.home
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert RuntimeSettings().directory == Path(f"/tmp/kvlake-{os.getuid()}")


def test_the_users_own_runtime_directory_is_used_if_it_exists(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert RuntimeSettings().directory == Path("/tmp/kvlake")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert RuntimeSettings().directory == Path(f"/tmp/kvlake-{os.getuid()}")


def test_a_socket_path_too_long_for_linux_is_refused() -> None:
    said = problem(f"runtime: {{directory: /{'d' * 100}}}")
    assert "choose a shorter runtime.directory" in said


def test_the_default_file_has_the_default_values() -> None:
    assert load(CONFIGS / "default.yaml").model_dump() == Config().model_dump()


def test_engines_choose_their_chunks_with_every_file() -> None:
    # With a number of its own, a file would refuse a model whose blocks do not divide 256 tokens.
    for file in CONFIGS.glob("*.yaml"):
        config = load(file, environment={"KVLAKE_BUCKET": "b"})
        assert own_chunk_tokens(config) is None, file


def test_the_default_file_has_every_setting() -> None:
    text = (CONFIGS / "default.yaml").read_text()
    for section in (name for name in Config.model_fields if name != "store"):
        for name in type(getattr(Config(), section)).model_fields:
            assert f"  {name}:" in text or f"  # {name}:" in text, f"{section}.{name}"


def test_the_example_for_s3_is_valid() -> None:
    config = load(CONFIGS / "s3.yaml", environment={"KVLAKE_BUCKET": "b"})
    assert config.store is not None
    assert config.store.url == "s3://b"
    with pytest.raises(ConfigError, match="KVLAKE_BUCKET is not set"):
        load(CONFIGS / "s3.yaml", environment={})


def test_the_example_for_gpus_is_valid() -> None:
    config = load(CONFIGS / "gpu.yaml", environment={"KVLAKE_COPY_THREADS": "8"})
    assert (config.host.size, config.copies.threads) == (64 << 30, 8)
    assert config.gpu == Config().gpu


@pytest.mark.parametrize(
    ("written", "meant"),
    [("auto", "auto"), ("off", "off"), ("[1, 0]", (1, 0)), ("false", "off")],
)
def test_numa_nodes(written: str, meant: object) -> None:
    config = loads(f"host: {{numa: {written}}}")
    assert config.host.numa == meant
    assert loads(show(config)) == config


@pytest.mark.parametrize(
    "name", ["gone_keys_max", "prompts_kept", "transfers_kept", "curve_keys_max", "history_seconds"]
)
def test_what_is_kept_for_operators_may_be_nothing(name: str) -> None:
    assert getattr(loads(f"limits: {{{name}: 0}}").limits, name) == 0
    with pytest.raises(ConfigError, match=name):
        loads(f"limits: {{{name}: -1}}")


def test_too_little_to_show_anything_is_refused() -> None:
    assert loads("limits: {history_seconds: 1m}").limits.history_seconds == 60
    with pytest.raises(ConfigError, match="history_seconds=59s is less than the minute"):
        loads("limits: {history_seconds: 59s}")
    assert loads("limits: {curve_keys_max: 1024}").limits.curve_keys_max == 1024
    with pytest.raises(ConfigError, match="curve_keys_max=1023 is too few for an estimate"):
        loads("limits: {curve_keys_max: 1023}")


def test_a_rate_at_which_requests_would_never_be_sent_in_time_is_refused() -> None:
    """Each would wait for its turn until its deadline, and so would the next."""
    store = "store: {{url: 'file:///tmp/b', requests_per_second_max: 2, reads_inflight_max: {}}}"
    assert loads(store.format(56)).store
    with pytest.raises(ConfigError, match=r"requests_per_second_max=2: only 60 .*the last of 61 "):
        loads(store.format(57))


@pytest.mark.parametrize("written", ["[]", "[0, 0]", "[-1]", "[1024]", "node0", "3"])
def test_invalid_numa_nodes(written: str) -> None:
    assert "nor a list of NUMA nodes such as [0, 1]" in problem(f"host: {{numa: {written}}}")


def test_prefault_threads() -> None:
    assert loads("host: {prefault_threads: 3}").host.touching_threads == 3
    assert 1 <= Config().host.touching_threads <= 8


def test_the_exported_schema_is_current() -> None:
    assert (CONFIGS / "schema.json").read_text() == schema(), (
        "run: .venv/bin/kvlake config schema > configs/schema.json"
    )


@pytest.mark.parametrize("name", ["default.yaml", "gpu.yaml", "s3.yaml"])
def test_editors_accept_the_examples(name: str) -> None:
    document: Any = yaml.safe_load((CONFIGS / name).read_text())
    jsonschema.Draft202012Validator(json.loads(schema())).validate(document)


def test_editors_refuse_what_the_sidecar_refuses() -> None:
    validator = jsonschema.Draft202012Validator(json.loads(schema()))
    documents: list[dict[str, Any]] = [
        {"hots": {}},
        {"host": {"size": "lots"}},
        {"limits": {"lookup_wait": "soon"}},
    ]
    for document in documents:
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(document)
