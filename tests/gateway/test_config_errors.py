"""A configuration with mistakes: each names the place, what was found and what would be right, all at once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.gateway.config_load import InvalidConfig, load_config

UPSTREAM = '[upstreams.local]\nbase_url = "http://127.0.0.1:8000/v1"\nmodels = ["q"]\n'
SECRET = "sk-secret-canary-0123456789"


def problems(folder: Path, text: str, environment: dict[str, str] | None = None) -> tuple[str, ...]:
    path = folder / ("headrace.json" if text.lstrip().startswith("{") else "headrace.toml")
    path.write_text(text)
    with pytest.raises(InvalidConfig) as caught:
        load_config(path, environment or {})
    return tuple(line.removeprefix(f"{folder}/") for line in caught.value.problems)


# (what follows UPSTREAM's three lines, so from line 4 on; how the complaint starts; what it says)
BAD_TOML = [
    ("[serverr]\nport = 1\n", "headrace.toml:4: unknown key serverr", "Did you mean server?"),
    ("[server]\nprot = 1\n", "headrace.toml:5: unknown key server.prot", "Did you mean port?"),
    ("[server]\nport = 80800\n", "headrace.toml:5: server.port", "from 0 to 65,535, but it is 80800"),
    ('[server]\nlog_level = "loud"\n', "headrace.toml:5: server.log_level", "debug, info, warning"),
    ("[server]\nhold_back_s = -1\n", "headrace.toml:5: server.hold_back_s", "seconds, but it is -1"),
    ('[upstreams.b]\nbase_url = "localhost:8000"\n', "headrace.toml:5: upstreams.b.base_url", "not a URL such as"),
    ('[upstreams.b]\nbase_url = "http://h?x=1"\n', "headrace.toml:5: upstreams.b.base_url", "query"),
    ('[upstreams.b]\nbase_url = "http://u:p@h"\n', "headrace.toml:5: upstreams.b.base_url", "api_key"),
    ('[upstreams.b]\nbase_url = "http://h:99999"\n', "headrace.toml:5: upstreams.b.base_url", "port"),
    ('[upstreams.b]\nbase_url = "http://[::1/v1"\n', "headrace.toml:5: upstreams.b.base_url", "not a URL such as"),
    ('[upstreams.b]\nbase_url = "http://a b/v1"\n', "headrace.toml:5: upstreams.b.base_url", "holds a blank"),
    ("[upstreams.b]\nurls = []\n", "headrace.toml:5: upstreams.b.urls", "is empty"),
    (
        '[upstreams.b]\nbase_url = "http://h"\nmodels = ["m", ""]\n',
        "headrace.toml:6: upstreams.b.models",
        'a list of names, but it holds ""',
    ),
    ('[upstreams.""]\nbase_url = "http://h"\n', "headrace.toml:4: upstreams. has no name", "give it one"),
    ('[models.""]\nupstream = "local"\n', "headrace.toml:4: models. has no name", "give it one"),
    ('[server]\ndatabase = "mysql://u:p@h/d"\n', "headrace.toml:5: server.database", "postgresql://"),
    ('[upstreams.b]\nbase_url = "${A:-${B}}"\n', "headrace.toml:5: upstreams.b.base_url", "inside another"),
    ('[upstreams.b]\nbase_url = "${NOWHERE:-}"\n', "headrace.toml:5: upstreams.b.base_url", "is empty"),
    ('[upstreams.b]\nmodels = ["x"]\n', "headrace.toml:4: upstreams.b has no base_url", "http://127.0.0.1:8000/v1"),
    ('[upstreams.b]\nbase_url = "http://h"\nurls = ["http://i"]\n', "headrace.toml:6: upstreams.b.urls", "both"),
    (
        '[upstreams.b]\nbase_url = "http://h"\ndialect = "antropic"\n',
        "headrace.toml:6: upstreams.b.dialect",
        "Did you mean anthropic?",
    ),
    (
        '[upstreams.b]\nbase_url = "http://h"\ntimeouts = { first = 1 }\n',
        "headrace.toml:6: unknown key upstreams.b.timeouts.first",
        "Did you mean first_token?",
    ),
    (
        '[upstreams.b]\nbase_url = "http://h"\nheaders = { Host = "x" }\n',
        "headrace.toml:6: upstreams.b.headers.Host",
        "cannot be configured",
    ),
    (
        '[upstreams.b]\nbase_url = "http://h"\nmodels = ["m"]\nfallback_model = "n"\n',
        "headrace.toml:7: upstreams.b.fallback_model",
        "models are m",
    ),
    ('[models.x]\nupstream = "lokal"\n', "headrace.toml:5: models.x.upstream", "Did you mean local?"),
    ('[models.x]\nupstream = "local"\n', "headrace.toml:4: models.x points to local, which serves q", "upstream_model"),
    ("[models.x]\ncontext_window = 10\n", "headrace.toml:4: models.x has no upstream", "no upstream lists"),
    ('[models.q]\ncontext_window = "8k"\n', "headrace.toml:5: models.q.context_window", 'but it is "8k"'),
    ("[models.q]\nprice = { input = -1 }\n", "headrace.toml:5: models.q.price.input", "0 or more"),
    ("[models.q]\nprice = { input = 0.00000001 }\n", "headrace.toml:5: models.q.price.input", "6 decimals"),
    ('[models.q]\nfallbacks = ["qq"]\n', "headrace.toml:5: models.q.fallbacks", "no upstream and no model"),
    ("[models.q.presets]\ntemperature = 3\n", "headrace.toml:5: models.q.presets.temperature", "0 to 2"),
    ("[models.q.presets]\ntemprature = 1\n", "headrace.toml:5: temprature is no request default", "temperature"),
    ("[presets]\nseed = 1.5\n", "headrace.toml:5: presets.seed", "a whole number, but it is 1.5"),
    ('[aliases]\ngpt = "qq"\n', "headrace.toml:5: aliases.gpt", "Did you mean q?"),
    ('[aliases]\nq = "q"\n', "headrace.toml", "an alias of q and a model too"),
    ('[routing]\ndefault = "lokal"\n', "headrace.toml:5: routing.default", "Did you mean local?"),
    ('[routing]\nfallback = ["clod"]\n', "headrace.toml:5: routing.fallback", "no upstream and no model"),
    (
        '[[routing.rules]]\nmatch = { max_tokns = ">1" }\ntarget = "local"\n',
        "headrace.toml:5: routing.rules[0].match.max_tokns",
        "Did you mean max_tokens?",
    ),
    (
        '[[routing.rules]]\ntarget = "local"\n[routing.rules.match]\nmax_tokens = "4096"\n',
        "headrace.toml:7: routing.rules[0].match.max_tokens",
        "a comparison such as '>4096'",
    ),
    (
        '[[routing.rules]]\nmatch = { stream = "yes" }\ntarget = "local"\n',
        "headrace.toml:5: routing.rules[0].match.stream",
        "true or false",
    ),
    (
        "[[routing.rules]]\nmatch = { model = [] }\ntarget = 'local'\n",
        "headrace.toml:5: routing.rules[0].match.model",
        "empty list",
    ),
    (
        '[[routing.rules]]\nmatch = { max_tokens = ">1" }\ntarget = "lokal"\n',
        "headrace.toml:6: routing.rules[0].target",
        "Did you mean local?",
    ),
    ('[[routing.rules]]\ntarget = "local"\n', "headrace.toml:4: routing.rules[0] has no match", "match = {}"),
    ("[[routing.rules]]\nmatch = {}\n", "headrace.toml:4: routing.rules[0] has no target", "name an upstream"),
    (
        '[[routing.rules]]\nmatch = {}\ntarget = "local"\nmodel = "z"\n',
        "headrace.toml:7: routing.rules[0].model",
        "local serves q",
    ),
    (
        '[[routing.rules]]\nmatch = { model = "z" }\ntarget = "local"\n',
        "headrace.toml:6: routing.rules[0].target",
        "give the rule a `model`",
    ),
    (
        '[[routing.rules]]\nmatch = { max_tokens = inf }\ntarget = "local"\n',
        "headrace.toml:5: routing.rules[0].match.max_tokens",
        "a number or a comparison",
    ),
    ('[upstreams.b]\nbase_url = "http://h"\napi_key = "a\\nb"\n', "headrace.toml:6: upstreams.b.api_key", "line break"),
    ("[plans.p]\nrpm = 0\n", "headrace.toml:5: plans.p.rpm", "from 1"),
    ('[plans.p]\nbudget = 5\nbudget_period = "yearly"\n', "headrace.toml:6: plans.p.budget_period", "day, week, month"),
    ('[plans.p]\nbudget_period = "day"\n', "headrace.toml:5: plans.p.budget_period", "without a budget"),
    ("[engine.e]\nmax_modle_len = 1\n", "headrace.toml:5: unknown key engine.e.max_modle_len", "max_model_len"),
    ("[engine.e]\nmax_model_len = -5\n", "headrace.toml:4: engine.e --max-model-len", "2 or more"),
    ("[engine.e]\nport = 0\n", "headrace.toml:5: engine.e.port", "fixed port"),
    ("[engine.e]\nport = 9\n[engine.f]\nport = 9\n", "headrace.toml:5: engine.e.port", "another engine's"),
    ("[engine.local]\n", "headrace.toml:4: engine", "an upstream by itself"),
    ('[headrace]\nbase_url = "http://h"\n[taotoken]\n', "headrace.toml:6: taotoken", "the same section"),
    ('upstream = 1\n[x]\n"a b".c = 2\n', "headrace.toml:4: unknown key upstreams.local.upstream", "Known here"),
    ('[upstreams.b]\nbase_url = "${NOWHERE}"\n', "headrace.toml:5: upstreams.b.base_url", "NOWHERE, which is not set"),
    ('[upstreams.b]\nbase_url = "${a b}"\n', "headrace.toml:5: upstreams.b.base_url", "write ${NAME}"),
    ('[upstreams.b]\nbase_url = "http://${H"\n', "headrace.toml:5: upstreams.b.base_url", "without `}`"),
    (
        '[upstreams.b]\nbase_url = "http://h"\napi_key = "${file:none.txt}"\n',
        "headrace.toml:6: upstreams.b.api_key needs the file",
        "No such file",
    ),
    ("[upstreams.b\n", "headrace.toml:4: not valid TOML", "column"),
    ("a = [1,\n", "headrace.toml:5: not valid TOML", "end of the file"),
]


@pytest.mark.parametrize(("more", "start", "says"), BAD_TOML, ids=[case[1] for case in BAD_TOML])
def test_a_mistake_is_told_with_its_line_and_the_way_out(tmp_path: Path, more: str, start: str, says: str) -> None:
    found = problems(tmp_path, UPSTREAM + more)
    first = next((line for line in found if line.startswith(start)), None)
    assert first is not None, found
    assert says in first


def test_a_key_may_be_a_variable_that_is_not_set_where_the_file_says_so(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(UPSTREAM + 'api_key = "${LOCAL_KEY:-}"\nheaders = { x-team = "${TEAM:-}" }\n')
    upstream = load_config(path, {}).upstreams["local"]
    assert (upstream.api_key, upstream.headers) == (None, ())
    assert load_config(path, {"LOCAL_KEY": "sk-1"}).upstreams["local"].api_key == "sk-1"


@pytest.mark.parametrize("fallback", ['"q"', '"local"', '{ upstream = "local", model = "q" }'])
def test_a_fallback_to_where_a_model_is_asked_first_is_a_warning(tmp_path: Path, fallback: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(UPSTREAM + f'[models.q]\nupstream = "local"\nfallbacks = [{fallback}]\n')
    (warning,) = load_config(path, {}).warnings
    assert warning.startswith(f"{path}:6: models.q.fallbacks names") and "asked already" in warning


@pytest.mark.parametrize("key", ["$LOCAL_KEY", "%LOCAL_KEY%", "{{ key }}", "<your key>", "your-api-key", "密钥"])
def test_a_key_that_is_a_placeholder_still_is_a_warning(tmp_path: Path, key: str) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(UPSTREAM + f'api_key = "{key}"\n')
    (warning,) = load_config(path, {}).warnings
    assert warning.startswith(f"{path}:4: upstreams.local.api_key") and "placeholder" in warning


def json_config(**more: object) -> str:
    provider = {"base_url": "http://127.0.0.1:8000/v1", "models": ["q"]}
    return json.dumps({"providers": {"local": provider}, "routing": {"default": "local"}, **more})


@pytest.mark.parametrize(
    ("text", "start", "says"),
    [
        (json_config(rout={}), "headrace.json /rout: unknown key rout", "Did you mean routing?"),
        (
            json_config(server={"port": "x"}),
            "headrace.json /server/port: server.port",
            'must be a number, but it is "x"',
        ),
        (
            json_config(rules=[{"match": {"tools": "many"}, "target": "local"}]),
            "headrace.json /rules/0/match/tools",
            "'>4",
        ),
        (
            json_config(models={"a/b": {"upstream": 3}}),
            "headrace.json /models/a~1b/upstream",
            "must be text, but it is 3",
        ),
        (json_config(default_model="Q"), "headrace.json /default_model: default_model", "Did you mean q?"),
        ('{"providers": {}, "providers": {}}', "headrace.json: the key 'providers' stands twice", ""),
        ('{"providers": {,}}', "headrace.json:1: not valid JSON", "column 16"),
        ("{}", "headrace.json /: names no upstream", "[upstreams.NAME]"),
        ('{"providers": {"\\ud800": {}}}', "headrace.json: a string holds half of a surrogate pair", ""),
        ('{"timeout": ' + "9" * 5000 + "}", "headrace.json: nested too deeply, or a number is too long", ""),
        (json_config(presets={"temperature": 10**400}), "headrace.json /presets/temperature", "0 to 2"),
        ('{"base_url": 7, "model": "m"}', "headrace.json: base_url must be text", ""),
    ],
)
def test_a_mistake_in_json_is_told_with_its_pointer(tmp_path: Path, text: str, start: str, says: str) -> None:
    found = problems(tmp_path, text)
    first = next((line for line in found if line.startswith(start)), None)
    assert first is not None, found
    assert says in first


def test_all_mistakes_are_told_at_once(tmp_path: Path) -> None:
    found = problems(tmp_path, UPSTREAM + '[server]\nport = "x"\nhosst = "h"\n[models.m]\nupstream = "nope"\n')
    assert [line.split(" ")[0] for line in found] == ["headrace.toml:8:", "headrace.toml:5:", "headrace.toml:6:"]


def test_with_strict_false_an_unknown_key_is_a_warning_and_a_wrong_value_stays_an_error(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text("strict = false\ncolour = 3\n" + UPSTREAM)
    (warning,) = load_config(path, {}).warnings
    assert warning.startswith(f"{path}:2: unknown key colour.")
    path.write_text("strict = false\n" + UPSTREAM + '[server]\nport = "x"\n')
    with pytest.raises(InvalidConfig, match=r"server\.port"):
        load_config(path, {})


def test_a_message_never_shows_a_secret(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(SECRET)
    text = (
        UPSTREAM
        + '[upstreams.b]\nbase_url = "${SECRET}"\napi_key = "${file:key}"\nmax_retries = "${SECRET}"\n'
        + 'dialect = "${SECRET}"\nheaders = { a = "${SECRET}é" }\n'
        + f'[upstreams.c]\nbase_url = "http://h"\napi_key = ["{SECRET}"]\n'
    )
    found = problems(tmp_path, text, {"SECRET": SECRET})
    assert len(found) >= 5
    assert SECRET not in "\n".join(found)


def test_a_snapshot_does_not_print_its_secrets(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    path.write_text(
        UPSTREAM
        + f'api_key = "{SECRET}"\nheaders = {{ x-key = "{SECRET}" }}\n[server]\ndatabase = "postgresql://u:{SECRET}@h/d"\n'
        + f'[engine.e]\napi_key = "{SECRET}"\n'
    )
    snapshot = load_config(path, {})
    assert snapshot.upstreams["local"].api_key == SECRET
    assert snapshot.upstreams["e"].api_key == SECRET
    assert SECRET not in repr(snapshot)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"none\.toml: cannot be read: No such file"):
        load_config(tmp_path / "none.toml", {})


def test_an_upstream_without_a_price_that_stands_in_for_a_priced_model_is_named(tmp_path: Path) -> None:
    path = tmp_path / "headrace.toml"
    text = """
        [upstreams.cloud]
        base_url = "https://cloud.example/v1"
        [upstreams.spare]
        base_url = "https://spare.example/v1"
        models = ["other"]
        [models.big]
        upstream = "cloud"
        price = { input = 2, output = 8 }
        [models.free]
        upstream = "cloud"
        [routing]
        default = "cloud"
        fallback = "spare"
    """
    path.write_text(text)
    (warning,) = load_config(path, {}).warnings
    assert warning.startswith("models.big: the upstream spare may answer for it with other, which has no price")
    path.write_text(text + '[models.other]\nupstream = "spare"\nprice = { input = 1, output = 2 }\n')
    assert load_config(path, {}).warnings == ()
