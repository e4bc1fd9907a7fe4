"""The server's page in a real browser, over streams that are replayed."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import (
    DESKTOP,
    PHONE,
    WIDE,
    brightness,
    is_as_wide_as_the_screen,
    needs_browser,
    open_browser,
    press,
    run_script,
    show,
    violations,
)
from tests.serve.kit import ScriptedEngine, serving
from tests.serve.replay import DEEP, HOSTILE, TEXT, TOKENS, Replay, replaying

pytestmark = needs_browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as driver:
        yield driver


@pytest.fixture(scope="module")
def server() -> Iterator[Replay]:
    with replaying() as replay:
        yield replay


def until(browser: Any, script: str) -> Any:
    """The first true value of an expression."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 10, 0.02).until(lambda _: run_script(browser, f"return {script}"))


def opened(browser: Any, server: Replay, **how: Any) -> None:
    """The page, once it knows the model and the server."""
    browser.get_log("browser")  # What was said before is another test's.
    show(browser, server.address, **how)
    until(browser, "state.model !== null && !element('server-facts').hidden")
    server.bodies.clear()


def said(browser: Any, id: str) -> str:
    return run_script(browser, f"return document.getElementById('{id}').innerText")


def ask(browser: Any, prompt: str, ended: bool = True) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.find_element("id", "prompt").send_keys(prompt)
    keys = ActionChains(browser).key_down(Keys.CONTROL).send_keys(Keys.ENTER).key_up(Keys.CONTROL)
    keys.perform()
    if ended:
        until(browser, "state.abort === null && !document.querySelector('.running')")


def test_a_text_arrives_token_by_token(browser: Any, server: Replay) -> None:
    opened(browser, server)
    assert "toy · drafter longspec, tree 1,1 · up to 512 tokens" in said(browser, "model")
    ask(browser, "Say it")
    [body] = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Say it"}]
    assert (
        body["temperature"] == 0.7 and body["top_p"] == 1 and body["max_completion_tokens"] == 256
    )
    assert body["stream"] and body["stream_options"] == {"include_usage": True}
    assert body["longspec"] == {"rounds": True} and body["seed"] >= 0
    spans = "[...document.querySelectorAll('#turns .token')]"
    shown = run_script(browser, f"return {spans}.map((each) => each.textContent)")
    assert shown == [token["text"].replace("\n", "↵\n") for token in TOKENS]
    depths = run_script(browser, f"return {spans}.map((each) => each.className)")
    assert depths[:5] == [
        "token prefill",
        "token draft depth-1",
        "token draft depth-2",
        "token bonus",
        "token bonus",
    ]
    assert depths[-4:] == ["token draft depth-8"] * 2 + ["token bonus", "token draft depth-1"]
    facts = run_script(browser, "return document.querySelector('#turns .facts').innerText")
    assert facts.startswith(f"{len(TOKENS)} tokens in 4 passes of the target · 3.75 tokens a pass")
    assert "12 prompt tokens, 8 of them reused · ended by stop" in facts
    assert run_script(browser, "return document.querySelector('.plain').textContent") == TEXT
    mean = f"{(2 + DEEP + 1) / 4:.2f} accepted a round over 4 rounds, at most {DEEP}."
    assert said(browser, "chart-said").startswith(mean)
    assert run_script(browser, "return element('bars').getAttribute('d')").count("V") == 4
    assert said(browser, "announce").startswith("The answer ended.")

    ask(browser, "And again")
    roles = [message["role"] for message in server.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.bodies[-1]["messages"][1]["content"] == TEXT
    browser.find_element("id", "clear").click()
    assert run_script(browser, "return element('turns').children.length") == 0
    ask(browser, "Afresh")
    assert len(server.bodies[-1]["messages"]) == 1


def test_nothing_of_a_model_is_run_and_nobody_else_is_asked(browser: Any, server: Replay) -> None:
    opened(browser, server)
    ask(browser, HOSTILE)
    press_token(browser, 2)
    assert HOSTILE.replace(" ", "␣") in said(browser, "round-box")
    assert browser.title == "longspec-serve"
    markup = "document.querySelectorAll('#turns img, #turns b, #tree img, #turns script')"
    assert run_script(browser, f"return {markup}.length") == 0
    hosts = "performance.getEntriesByType('resource').map((each) => new URL(each.name).origin)"
    assert run_script(browser, f"return [...new Set({hosts})]") == [server.address.rstrip("/")]
    assert browser.get_log("browser") == []  # Nothing was refused or failed to load, either.
    assert server.foreign == []
    # What the policy is for: had the page a hole, the script would still not run.
    run_script(browser, f"element('turns').innerHTML = {HOSTILE.removeprefix('</script>')!r}")
    assert until(browser, "document.querySelector('#turns img') !== null")
    refused = [entry["message"] for entry in browser.get_log("browser")]
    assert refused and all("Content Security Policy" in message for message in refused)
    assert browser.title == "longspec-serve"


def press_token(browser: Any, index: int) -> None:
    run_script(browser, f"document.querySelectorAll('#turns .token')[{index}].focus()")


def test_keys_go_from_token_to_token(browser: Any, server: Replay) -> None:
    from selenium.webdriver.common.keys import Keys

    opened(browser, server)
    ask(browser, "Say it")
    stops = "return document.querySelectorAll('#turns .token[tabindex=\"0\"]').length"
    chosen = "return document.activeElement.getAttribute('aria-label')"
    assert run_script(browser, stops) == 1  # A long text is one stop of the Tab key.
    press_token(browser, 0)
    assert "drawn from the prefill: nothing was proposed" in said(browser, "round-box")
    press(browser, Keys.ARROW_RIGHT)
    assert run_script(browser, chosen) == "cat: draft token accepted at depth 1, round 1"
    told = said(browser, "round-said")
    assert told == (
        "4 tokens proposed, 2 accepted. "
        "The walk stopped: the tree has nothing below the last accepted token."
    )
    assert said(browser, "announce") == told
    assert "unused" not in said(browser, "tree")
    drawn = run_script(browser, "return document.querySelector('#tree .drawn').innerText")
    assert drawn == "␣sat drawn by the target: the bonus"
    press(browser, Keys.ARROW_DOWN)
    assert run_script(browser, chosen) == "white space: bonus, round 2"
    assert said(browser, "round-said").endswith(
        "the target drew “↵”, and the children of that node were “␣on”, “␣down”."
    )
    press(browser, Keys.ARROW_DOWN)
    assert said(browser, "round-title") == "Round 3"
    assert "the only child of that node was “␣lower”" in said(browser, "round-said")
    press(browser, Keys.END)
    assert said(browser, "round-said").endswith("The walk stopped: the text ended there.")
    assert run_script(browser, "return document.querySelector('#tree .drawn')") is None
    press(browser, Keys.ARROW_RIGHT)  # There is nothing to the right.
    press(browser, Keys.ARROW_UP)
    assert run_script(browser, chosen) == "deep: draft token accepted at depth 1, round 3"
    press(browser, Keys.HOME)
    assert run_script(browser, chosen) == "The: drawn from the prefill"
    assert run_script(browser, stops) == 1
    selected = "return document.querySelectorAll('[aria-selected=true]').length"
    assert run_script(browser, selected) == 1


def test_pointing_shows_and_clicking_keeps(browser: Any, server: Replay) -> None:
    from selenium.webdriver.common.action_chains import ActionChains

    opened(browser, server, size=WIDE)
    ask(browser, "Say it")
    tokens = browser.find_elements("css selector", "#turns .token")
    tokens[5].click()
    assert said(browser, "round-title") == "Round 3"
    ActionChains(browser).move_to_element(tokens[1]).perform()
    assert said(browser, "round-title") == "Round 1"
    ActionChains(browser).move_to_element(browser.find_element("tag name", "h1")).perform()
    assert said(browser, "round-title") == "Round 3"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("same", f"identical, all {len(TOKENS)} tokens: {len(TOKENS) - 1} passes of the target "),
        ("differ", f"first difference at token 3: here “{HOSTILE}”, plainly “␣other”."),
        (
            "alone",
            "identical in 0 tokens, then one of the two ended early. The server refused: the ",
        ),
        ("wait", "identical in 5 tokens, then one of the two ended early. Stopped."),
    ],
)
def test_a_plain_twin_is_compared(browser: Any, server: Replay, prompt: str, expected: str) -> None:
    opened(browser, server)
    run_script(browser, "element('settings').open = true; element('seed').value = 7")
    run_script(browser, "state.model.longspec.identical = false")
    browser.find_element("id", "twin").click()
    ask(browser, prompt, ended=prompt != "wait")
    line = "document.querySelector('.twin').textContent"
    if prompt == "wait":
        # The twin has told three tokens at this point, and the text five.
        until(browser, f"{line} === 'Plain twin: identical so far (3 tokens).'")
        browser.find_element("id", "stop").click()
        until(browser, "state.abort === null")
        expected = expected.replace("5", "3")
    assert run_script(browser, f"return {line}").startswith(
        f"Plain twin: {expected}".replace(HOSTILE, HOSTILE.replace(" ", "␣"))
    )
    marked = "return [...document.querySelectorAll('.differs')].map((each) => each.textContent)"
    assert run_script(browser, marked) == ([HOSTILE] if prompt == "differ" else [])
    unpromised = run_script(browser, f"return {line}.includes('does not promise')")
    assert unpromised == (prompt == "differ")
    speculations = [body["longspec"].get("speculation", True) for body in server.bodies]
    assert sorted(speculations) == [False, True]
    assert [body["seed"] for body in server.bodies] == [7, 7]


def test_stopping_closes_the_stream(browser: Any, server: Replay) -> None:
    opened(browser, server)
    before = server.gone
    ask(browser, "wait", ended=False)
    until(browser, "document.querySelectorAll('#turns .token').length === 5")
    assert run_script(browser, "return element('send').getAttribute('aria-disabled')") == "true"
    ask(browser, "too early", ended=False)
    assert len(server.bodies) == 1
    browser.find_element("id", "stop").click()
    until(browser, "state.abort === null && !document.querySelector('.running')")
    assert said(browser, "problem") == ""
    until(browser, "element('stop').getAttribute('aria-disabled') === 'true'")
    deadline = 200
    while server.gone == before and (deadline := deadline - 1):
        browser.execute_async_script("setTimeout(arguments[0], 20)")
    assert server.gone == before + 1
    run_script(browser, "element('prompt').value = ''")
    ask(browser, "go on")  # What was said until then is the model's turn.
    assert [message["role"] for message in server.bodies[-1]["messages"]][:2] == [
        "user",
        "assistant",
    ]


def test_errors_are_sentences(browser: Any, server: Replay) -> None:
    opened(browser, server)
    for prompt, sentence, tokens in (
        ("full", "The server refused: 64 requests are waiting. Try again in 7 seconds.", 0),
        ("error", "The server ended the answer: the target's logits were not finite", 5),
        ("broken", "The connection broke before the end of the answer.", 5),
    ):
        ask(browser, prompt)
        assert said(browser, "problem") == sentence
        last = "document.querySelector('#turns li:last-child')"
        count = run_script(browser, f"return {last}.querySelectorAll('.token').length")
        assert count == tokens
        # What brought nothing can be sent again.
        kept = run_script(browser, "return element('prompt').value")
        assert kept == ("" if tokens else prompt)
        run_script(browser, "element('prompt').value = ''")


def test_a_key_is_asked_for_and_not_kept(browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    with replaying(key="open", chat=False) as server:
        show(browser, server.address)
        until(browser, "element('problem').textContent !== ''")
        assert said(browser, "problem") == ("The server wants an API key. Type it under Settings.")
        browser.find_element("id", "key").send_keys("wrong", Keys.TAB)
        until(browser, "element('problem').textContent.includes('does not know')")
        browser.find_element("id", "key").clear()
        browser.find_element("id", "key").send_keys("open", Keys.TAB)
        until(browser, "state.model !== null && !element('server-facts').hidden")
        assert said(browser, "problem") == ""
        # This model has no chat template: the page continues texts.
        assert said(browser, "prompt-label").startswith("Text to continue")
        ask(browser, "Once")
        [body] = server.bodies
        assert body["prompt"] == "Once" and body["max_tokens"] == 256 and "messages" not in body
        assert run_script(browser, "return document.querySelector('.plain').textContent") == TEXT
        kept = "localStorage.length + sessionStorage.length + document.cookie.length"
        assert run_script(browser, f"return {kept}") == 0
        show(browser, server.address)
        assert until(browser, "element('problem').textContent").startswith("The server wants")


def test_the_server_is_watched_while_the_page_is_visible(browser: Any, server: Replay) -> None:
    opened(browser, server)
    facts = said(browser, "server-facts")
    assert "88.1" in facts and "2 of 4 slots run, 3 wait" in facts
    rows = "[...document.querySelectorAll('#server-rows tbody tr')].map((row) => row.innerText)"
    assert run_script(browser, f"return {rows}") == ["812\t41\t1.25\t1 2 0 2", "12\t1\t–\t"]
    # From here on the test is the clock.
    run_script(
        browser,
        "clearTimeout(timer); window.waits = []; window.setTimeout = (_, ms) => waits.push(ms)",
    )
    hidden = "Object.defineProperty(document, 'visibilityState', {value: '%s', configurable: true})"
    signal = "document.dispatchEvent(new Event('visibilitychange'))"
    run_script(browser, f"{hidden % 'hidden'}; {signal}")
    polls = server.polls
    run_script(browser, f"{hidden % 'visible'}; {signal}")
    until(browser, "waits.length === 1")
    assert run_script(browser, "return waits") == [2000] and server.polls == polls + 1
    # The rounds since the last poll.
    shares = "longspec 1,1 (75 % of 40 rounds), plain (25 % of 40 rounds)"
    assert shares in said(browser, "server-facts")
    run_script(browser, f"{hidden % 'hidden'}; {signal}; poll()")
    assert run_script(browser, "return waits") == [2000] and server.polls == polls + 1


@pytest.mark.parametrize("size", [PHONE, DESKTOP, WIDE], ids=lambda size: str(size[0]))
def test_the_page_fits_the_screen(browser: Any, server: Replay, size: tuple[int, int]) -> None:
    opened(browser, server, size=size, scheme="dark")
    run_script(browser, "document.querySelectorAll('details').forEach((each) => each.open = true)")
    ask(browser, "wait " + "w" * 400, ended=False)
    until(browser, "document.querySelectorAll('#turns .token').length === 5")
    press_token(browser, 1)
    assert is_as_wide_as_the_screen(browser, size)
    tops = "['#content', '#round-box', '#server-rows'].map((each) => document.querySelector(each)"
    boxes = run_script(browser, f"return {tops}.getBoundingClientRect().toJSON())")
    assert all(0 <= box["left"] and box["right"] <= size[0] for box in boxes)
    beside = boxes[1]["left"] >= boxes[0]["right"]
    assert beside == (size != PHONE)
    # The tree is in sight of the token that was chosen.
    assert boxes[1]["bottom"] <= size[1] and boxes[1]["height"] > 60
    if size == PHONE:
        browser.find_element("id", "close").click()
        assert not browser.find_element("id", "round-box").is_displayed()
    browser.find_element("id", "stop").click()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_rules_of_accessibility(browser: Any, server: Replay, scheme: str) -> None:
    """Those that axe has, on a page with a text, its twin, a tree and an error."""
    opened(browser, server, scheme=scheme, motion="reduce")
    run_script(browser, "document.querySelectorAll('details').forEach((each) => each.open = true)")
    assert violations(browser) == []
    browser.find_element("id", "twin").click()
    ask(browser, "differ")
    ask(browser, "full")
    run_script(browser, "document.querySelectorAll('details').forEach((each) => each.open = true)")
    press_token(browser, 1)
    assert violations(browser) == []
    ground, ink = brightness(browser)
    assert (ground > 600 > ink) if scheme == "light" else (ground < 150 < ink)
    running = "document.querySelector('#turns li:last-child').classList.add('running')"
    blinks = "getComputedStyle(document.querySelector('.running .text'), '::after').animationName"
    run_script(browser, running)
    assert run_script(browser, f"return {blinks}") == "none"


def test_what_is_read_aloud_is_not_every_token(browser: Any, server: Replay) -> None:
    opened(browser, server)
    run_script(
        browser,
        "window.heard = []; new MutationObserver(() => heard.push(element('announce').textContent))"
        ".observe(element('announce'), {childList: true})",
    )
    ask(browser, "Say it")
    heard = run_script(browser, "return heard")
    assert len(heard) == 2 and heard[0] == "The answer begins."
    live = "return document.querySelectorAll('[aria-live], [role=status], [role=alert]').length"
    assert run_script(browser, live) == 2


def test_the_documented_example_is_understood(browser: Any, server: Replay) -> None:
    text = (Path(__file__).parents[2] / "docs" / "guides" / "serving.md").read_text()
    examples = map(json.loads, re.findall(r"```json\n(.*?)```", text, re.DOTALL))
    [told] = [
        example["longspec"] for example in examples if "rounds" in example.get("longspec", {})
    ]
    opened(browser, server)
    rounds = browser.execute_script("return roundsOf(arguments[0], 6)", told)
    assert [each["number"] for each in rounds] == [0, 7]
    assert [token["text"] for each in rounds for token in each["tokens"]] == [
        token["text"] for token in told["tokens"]
    ]
    [tree] = [each["tree"] for each in rounds if each["tree"]]
    assert [tree["draws"][node] for node in tree["path"]] == [
        token["text"] for token in rounds[1]["tokens"]
    ]


def test_over_the_server_s_own_routes(browser: Any) -> None:
    with serving(ScriptedEngine(), api_key="open") as client:
        # As typed into the browser's own question, which comes with the first answer.
        browser.get(client.url.replace("http://", "http://me:open@"))
        show(browser, client.url)
        run_script(browser, "element('max-tokens').value = 8")
        until(browser, "state.model !== null && !element('server-facts').hidden")
        ask(browser, "abc")
        assert said(browser, "problem") == ""
        spans = "[...document.querySelectorAll('#turns .token')]"
        shown = run_script(
            browser, f"return {spans}.map((each) => each.textContent + each.className)"
        )
        deep, bonus = "token draft depth-", "token bonus"
        first = ["dtoken prefill", f"e{deep}1", f"f{deep}2", f"g{bonus}"]
        assert shown == [*first, f"h{deep}1", f"i{deep}2", f"j{bonus}", f"k{bonus}"]
        press_token(browser, 1)
        assert said(browser, "tree").startswith("d the last token before this round")
        facts = run_script(browser, "return document.querySelector('#turns .facts').innerText")
        assert facts.startswith("8 tokens in 3 passes of the target")
        assert "3 prompt tokens, 4 of them reused · ended by length" in facts
        run_script(browser, "element('max-tokens').value = 13")
        ask(browser, "abc")
        assert "max_new_tokens=13 is unlucky; pass another number." in said(browser, "problem")
