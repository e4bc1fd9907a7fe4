"use strict";
// Shows the tree of the round that a token came from. Texts are set as text, never as markup.

function node(name, className, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// A token as it is read, with signs for white space and for half a character.
function readable(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "∅";
}

function counted(number, name) {
  return `${number} ${name}${number === 1 ? "" : "s"}`;
}

function code(text) {
  return node("code", "", readable(text));
}

// The nodes below one, the accepted one first.
function branch(tree, parent) {
  const below = tree.parents.map((each, index) => (each === parent ? index : -1)).filter((index) => index >= 0);
  if (!below.length) return null;
  const list = node("ul");
  const onPath = (index) => tree.path.indexOf(index);
  below.sort((one, other) => (onPath(other) >= 0) - (onPath(one) >= 0) || one - other);
  for (const index of below) list.append(leaf(tree, index));
  return list;
}

function leaf(tree, index) {
  const place = tree.path.indexOf(index);
  const item = node("li", place >= 0 ? "accepted" : "");
  item.append(code(tree.texts[index]));
  if (place === 0) item.append(node("span", "why", " the last token of the text so far"));
  if (place > 0) item.append(node("span", "why", ` depth ${place}: what the target drew, accepted`));
  const below = branch(tree, index) || node("ul");
  if (place >= 0 && place === tree.path.length - 1) {
    const drawn = node("li", "drawn");
    drawn.append(node("span", "why", "the target drew "), code(tree.drawn[place]), node("span", "why", `: ${tree.why}`));
    below.prepend(drawn);
  }
  if (below.children.length) item.append(below);
  return item;
}

// What is said is read aloud when it changes; the tree is there to be gone into.
function explain(panel, number, trees) {
  const said = panel.querySelector(".said");
  const drawing = panel.querySelector(".tree");
  said.replaceChildren();
  drawing.replaceChildren();
  if (number === 0) {
    said.append(node("p", "", "The first token is drawn from the prefill: nothing was proposed."));
    return;
  }
  const tree = trees[number - 1];
  said.append(node("h4", "", `Round ${number}`));
  if (!tree) {
    said.append(node("p", "", `The tree of this round was not kept; trees are there up to round ${trees.length}.`));
    return;
  }
  const proposed = tree.texts.length - 1;
  const accepted = tree.path.length - 1;
  said.append(node("p", "", `${counted(proposed, "token")} proposed, ${accepted} accepted. The accepted path ended: ${tree.why}.`));
  const list = node("ul");
  list.append(leaf(tree, 0));
  drawing.append(list);
}

// How a token came, in words.
function label(token) {
  const shown = token.textContent;
  const read = shown === "∅" ? "no whole character" : shown.replaceAll("↵", "").trim() || "white space";
  const round = roundOf(token);
  if (!round) return `${read}: drawn from the prefill`;
  const { depth } = token.dataset;
  return depth ? `${read}: draft token accepted at depth ${depth}, round ${round}` : `${read}: bonus, round ${round}`;
}

function roundOf(token) {
  return Number(token.parentElement.dataset.round);
}

// Makes a text of coloured tokens a list that is gone through by keys.
function listbox(text, tokens) {
  text.setAttribute("role", "listbox");
  text.setAttribute("aria-orientation", "horizontal");
  text.setAttribute("aria-describedby", "cases-help");
  for (const group of text.children) {
    const { round } = group.dataset;
    group.setAttribute("role", "group");
    group.setAttribute("aria-label", round === "0" ? "prefill" : `round ${round}`);
  }
  for (const token of tokens) {
    token.setAttribute("role", "option");
    token.setAttribute("aria-selected", "false");
    token.setAttribute("aria-label", label(token));
    token.tabIndex = -1;
  }
  // One token of the text is reached by the Tab key, the others by arrows.
  text.removeAttribute("tabindex");
  (tokens[1] || tokens[0]).tabIndex = 0;
}

function study(details) {
  const trees = JSON.parse(details.querySelector("script.trees").textContent);
  const text = details.querySelector(".text");
  const panel = details.querySelector(".panel");
  const tokens = [...text.querySelectorAll(".token")];
  let chosen = null;
  let shown = null;

  function show(round) {
    if (round === shown) return;
    shown = round;
    for (const group of text.children) group.classList.toggle("shown", Number(group.dataset.round) === round);
    explain(panel, round, trees);
  }
  function choose(token) {
    if (chosen) {
      chosen.setAttribute("aria-selected", "false");
      chosen.tabIndex = -1;
    }
    chosen = token;
    token.setAttribute("aria-selected", "true");
    token.tabIndex = 0;
    show(roundOf(token));
  }
  function ofRound(round) {
    return tokens.find((token) => roundOf(token) === round);
  }

  listbox(text, tokens);
  text.addEventListener("focusin", (event) => {
    const token = event.target.closest(".token");
    if (token) choose(token);
  });
  text.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token) token.focus();
  });
  text.addEventListener("mouseover", (event) => {
    const token = event.target.closest(".token");
    if (token) show(roundOf(token));
  });
  text.addEventListener("mouseleave", () => {
    if (chosen) show(roundOf(chosen));
  });
  text.addEventListener("keydown", (event) => {
    const here = tokens.indexOf(event.target.closest(".token"));
    if (here < 0) return;
    const round = roundOf(tokens[here]);
    const goal = {
      ArrowRight: tokens[here + 1],
      ArrowLeft: tokens[here - 1],
      ArrowDown: ofRound(round + 1),
      ArrowUp: ofRound(round - 1),
      Home: tokens[0],
      End: tokens[tokens.length - 1],
    };
    if (!(event.key in goal)) return;
    event.preventDefault();
    if (goal[event.key]) goal[event.key].focus();
  });
}

document.querySelectorAll("details.case").forEach(study);
