"""The report as a page: its contents, its safety and size, and its display in a browser."""

import gc
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, ViTConfig, ViTForImageClassification

import forge
from forge.debug.report import page

X = torch.ones(2, 4)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) * len("</script><script>document.title = 'owned'</script>")
        return x


def layers(count: int = 5) -> forge.Explanation:
    jitted = forge.jit(Layers(count), executors=["torch"])
    jitted(X).sum().backward()
    explained = forge.explain(jitted)
    explained.kept = jitted  # Dynamo keeps a program as long as the module
    return explained


def data_of(written: str) -> dict:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', written, re.DOTALL)
    return json.loads(found)


def llama(count: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        use_cache=False,
    )
    ids = torch.randint(128, (2, 16))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def vit() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    config = ViTConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
    )
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32), "labels": torch.randint(10, (2,))}
    return ViTForImageClassification(config), inputs


def profiled() -> forge.Explanation:
    jitted = forge.jit(Layers(5), executors=["torch"])
    jitted(X).sum().backward()
    return forge.explain(jitted, profile=True)


@pytest.fixture(scope="module")
def told() -> Iterator[forge.Explanation]:
    explained = layers()
    yield explained


def test_the_page_holds_every_operation_and_every_stage(told, tmp_path: Path) -> None:
    written = told.to_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == written
    data = data_of(written)
    assert sum(len(part["calls"]) for part in data["parts"]) == len(told.rows)
    assert [each["phase"] for each in data["stages"]["parts"]] == ["forward", "backward"]
    for part, stages in zip(
        data["stages"]["parts"],
        (forge.last_traces(told.kept), forge.last_backward_traces(told.kept)),
        strict=True,
    ):
        assert [name for name, _ in part["stages"]] == [trace.stage for trace in stages]
        runs = part["stages"][-1][1]
        lines = [data["stages"]["lines"][first + at] for first, count in runs for at in range(count)]
        assert lines == page._lines(stages[-1])


def test_an_edge_of_the_drawing_goes_from_who_makes_to_who_reads(told) -> None:
    forward, *_ = data_of(told.to_html())["parts"]
    names = [row.operation for row in told.rows if row.phase == "forward"][:5]
    linear, tanh = names.index("torch.nn.functional.linear"), names.index("torch.tanh")
    assert [linear, tanh] in forward["edges"] and [tanh, linear] not in forward["edges"]


def test_what_was_measured_is_summed_by_operation_and_executor(told, monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_of(page.page(told, told._still_there()))["costs"] is None
    measured = profiled()
    costs = data_of(measured.to_html())["costs"]
    for rows in costs.values():
        assert sum(row[1] for row in rows) == pytest.approx(sum(each.seconds for each in measured.costs))
        assert [row[1] for row in rows] == sorted((row[1] for row in rows), reverse=True)
    assert {row[0]: row[3] for row in costs["operations"]}["torch.nn.functional.linear, forward"] == 5
    assert [row[0] for row in costs["executors"]] == ["torch"]
    monkeypatch.setattr(page, "COSTS", 2)
    shortened = data_of(measured.to_html())["costs"]["operations"]
    assert shortened[2][0] == f"{len(costs['operations']) - 2} others" and len(shortened) == 3
    assert sum(row[3] for row in shortened) == len(measured.costs)


def test_layers_that_are_alike_are_one_fold(told) -> None:
    forward, *_ = data_of(told.to_html())["parts"]
    assert [5, 4] in forward["folds"] or [4, 4] in forward["folds"]


def test_nothing_of_a_program_ends_the_script_or_the_attribute_it_stands_in(told) -> None:
    written = told.to_html()
    assert written.count("</script>") == 2 and "owned" in written
    assert any("</script>" in each for each in data_of(written)["strings"])
    frame = told._repr_html_()
    assert frame.count("<") == frame.count(">") == 2 and frame.startswith("<iframe ")


def test_a_name_is_text_and_no_markup() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.__name__ = "<img src=x onerror=alert(1)>{{data}}"
    jitted = forge.jit(double)
    jitted(X)
    written = forge.explain(jitted).to_html()
    assert "<img" not in written and data_of(written)["name"] == double.__name__


def test_a_page_asks_nothing_of_the_network(told) -> None:
    written = told.to_html()
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", written)
    assert "default-src 'none'" in written


def test_an_explanation_keeps_no_program_alive_and_still_makes_its_page() -> None:
    jitted = forge.jit(lambda x: x.exp().sin())
    jitted(X)
    explained = forge.explain(jitted)
    assert data_of(explained.to_html())["stages"]["parts"]
    del jitted
    torch._dynamo.reset()
    gc.collect()
    data = data_of(explained.to_html())
    assert data["stages"]["parts"] == [] and data["operations"] == len(explained.rows) == 2


def test_stages_beyond_the_budget_are_left_out_and_counted(told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "BUDGET", 1)
    stages = data_of(told.to_html())["stages"]
    kept = sum(len(part["stages"]) for part in stages["parts"])
    every = len(forge.last_traces(told.kept)) + len(forge.last_backward_traces(told.kept))
    assert kept == 1 and stages["left"] == every - 1


@pytest.mark.parametrize("call", [False, True])
def test_what_compiled_nothing_has_a_page_that_says_so(call: bool) -> None:
    jitted = forge.jit(lambda x: x)
    if call:
        jitted(X)
    written = forge.explain(jitted).to_html()
    assert ("nothing was compiled, since" if call else "call the function first") in data_of(written)["summary"]


@pytest.mark.slow
@pytest.mark.parametrize("every", ["0", "1"])
def test_the_page_of_32_layers_is_under_two_megabytes(every: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_KEEP_STAGES", every)
    model, inputs = llama(32)
    jitted = forge.jit(model, executors=["inductor", "torch"])
    jitted(**inputs)[0].backward()
    written = forge.explain(jitted).to_html()
    assert len(written.encode()) < 2_000_000
    assert any(times >= 30 for times, _ in data_of(written)["parts"][0]["folds"])


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    paths = [shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")]
    if None in paths:
        pytest.skip("there is no chromium with its chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = paths[0]
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(paths[1]))
    yield driver
    driver.quit()


class Page:
    """A report in the browser."""

    def __init__(self, browser, explained: forge.Explanation, path: Path, width: int = 1280) -> None:
        self.browser = browser
        explained.to_html(path)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get(path.as_uri())
        assert browser.execute_script("return document.documentElement.dataset.ready") == "yes"

    def all(self, selector: str) -> list:
        return self.browser.find_elements("css selector", selector)

    def text(self, selector: str) -> str:
        return self.browser.find_element("css selector", selector).text

    def give(self, selector: str, value: str) -> None:
        """Type into a field, or choose an item of a list by its text."""
        (found,) = self.all(selector)
        if found.tag_name == "select":
            (option,) = [each for each in found.find_elements("tag name", "option") if each.text == value]
            option.click()
        else:
            found.clear()
            found.send_keys(value)

    def press(self, selector: str, shown: str) -> None:
        found = next(each for each in self.all(selector) if each.text == shown)
        found.send_keys("\n")  # by key: a reader may have no mouse

    def errors(self) -> list[str]:
        return [each["message"] for each in self.browser.get_log("browser")]


def test_a_browser_shows_the_page_as_text_alone(browser, told, tmp_path: Path) -> None:
    shown = Page(browser, told, tmp_path / "report.html")
    assert browser.title == "Layers · forge.explain" and shown.errors() == []
    assert "</script><script>" in shown.text("#lines")
    assert "layers.{0..4}.0" in shown.text("#table tbody") and "layers.2.0" not in shown.text("#table tbody")
    shown.press(".unfold", "show every layer")
    assert "layers.2.0" in shown.text("#table tbody")
    shown.give("#search", "torch.tanh layers.3")
    assert shown.text("#shown").startswith("1 of ") and "layers.3.1" in shown.text("#table tbody")
    shown.give("#search", "nowhere")
    assert shown.text("#shown").startswith("0 of ") and shown.text("#table tbody") == ""


def test_a_browser_shows_what_each_operation_takes_where_that_was_measured(browser, told, tmp_path: Path) -> None:
    for explained, shown in ((told, False), (profiled(), True)):
        (tmp_path / "page.html").write_text(explained.to_html())
        browser.get((tmp_path / "page.html").as_uri())
        assert browser.find_element("id", "measured").is_displayed() == shown
        assert browser.find_element("id", "unmeasured").is_displayed() != shown
    rows = [each.text.split("\n") for each in browser.find_elements("css selector", "#run-operations .bar")]
    assert ["torch.nn.functional.linear, forward (×5)"] in [row[:1] for row in rows]
    assert all(row[-1].endswith(("µs", "ms", " s")) for row in rows)


def test_every_field_has_a_name_and_no_page_is_wider_than_a_telephone(browser, told, tmp_path: Path) -> None:
    shown = Page(browser, told, tmp_path / "report.html", width=420)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 420
    fields = [*shown.all("input"), *shown.all("select"), *shown.all("button"), *shown.all("pre"), *shown.all("[role]")]
    fields = [each for each in fields if each.is_displayed() and each.get_attribute("role") != "status"]
    assert len(fields) > 20 and all(each.accessible_name for each in fields if each.get_attribute("role") != "search")


def test_the_frame_of_a_notebook_shows_the_operations(browser, told, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{told._repr_html_()}", encoding="utf-8")
    browser.get(path.as_uri())
    browser.switch_to.frame(browser.find_element("tag name", "iframe"))
    assert "torch.tanh" in browser.find_element("id", "table").text
    assert "to_html" in browser.find_element("id", "stage-note").text
    browser.switch_to.default_content()


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: llama(4), vit], ids=["llama", "vit"])
def test_a_browser_searches_filters_and_switches_stages_of_a_real_model(make, browser, tmp_path: Path) -> None:
    model, inputs = make()
    jitted = forge.jit(model, executors=["inductor", "torch"])
    jitted(**inputs)[0].backward()
    explained = forge.explain(jitted)
    shown = Page(browser, explained, tmp_path / "report.html")
    assert shown.text("#name") == type(model).__name__

    shown.give("#executor", "inductor")
    assert {each.text for each in shown.all("#table .pill")} == {"inductor"}
    first = shown.all("#table .open")[0]
    first.send_keys("\n")
    held = [row for row in explained.rows if row.region == first.text.split(":")[0]]
    assert held and len(shown.all("#table .detail tr")) == len([each for each in held if each.phase == "forward"])
    shown.give("#phase", "backward")
    assert [each.text for each in shown.all("#table tr.part")] == ["backward"]
    shown.give("#executor", "torch")
    shown.give("#search", "matmul")
    calls = shown.all("#table tr.call")
    assert calls and all("matmul" in each.text for each in calls)

    shown.press("#stages button", "recorded from Dynamo")
    recorded = str(forge.last_traces(jitted)[0]).splitlines()[0]
    assert shown.text("#code").splitlines()[0] == recorded
    shown.press("#stages button", "claim")
    shown.give("#compare", "1. recorded from Dynamo")
    assert "from “recorded from Dynamo” to “claim”" in shown.text("#stage-note")
    assert shown.all("#code .add") and shown.all("#code .remove")
    shown.give("#compare", "nothing")
    shown.give("#find", "attention")
    assert shown.all("#code mark") and "with “attention”" in shown.text("#stage-note")
    shown.give("#program", "backward")
    assert shown.text("#code").splitlines()[0].startswith("# backward, ")

    assert len(shown.all("#graphs .box")) > 20 and "×" in shown.text("#graphs svg")
    assert shown.text("#declines") and len(shown.all("#seconds .bar")) == len(explained.seconds)
    assert shown.errors() == []
