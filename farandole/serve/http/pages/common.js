"use strict";
// The common part of the pages.  All content from the server and the model is inserted as text.
// A page defines show(next, previous), which shows the state of the server.
const $ = id => document.getElementById(id);
const HISTORY = 60, RECENT = 2;  // seconds of the chart and the latencies, and of the throughput
const BUSY = 250, IDLE = 1000;  // milliseconds between two requests for the state
const KEY = "farandole-key";
let state = null, samples = [];

function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? {...more, authorization: "Bearer " + key} : more;
}

const number = new Intl.NumberFormat("en", {maximumFractionDigits: 1});
const seconds = s => s < 1 ? number.format(s * 1000) + " ms" : number.format(s) + " s";

function figure(id, value, note = "") {
  $(id).replaceChildren(element("b", value), element("small", note));
}

// ---- the server's state ----

async function poll() {
  const start = performance.now();
  let next = null, problem = "";
  try {
    const answer = await fetch("stats", {headers: headers(), cache: "no-store", signal: AbortSignal.timeout(10000)});
    $("access").hidden = answer.status !== 401;
    if (answer.ok) next = await answer.json();
    else problem = answer.status === 401 ? "API key required" : "status " + answer.status;
  } catch {
    problem = "no connection";
  }
  if ($("status").textContent !== (problem || "connected")) $("status").textContent = problem || "connected";
  $("status").classList.toggle("bad", Boolean(problem));
  if (next) {
    if (state && next.started !== state.started) samples = [];  // the server has been restarted
    samples.push(next);
    while (samples[0].time < next.time - HISTORY) samples.shift();
    $("model").textContent = next.model;
    show(next, state);
    state = next;
  }
  const spent = performance.now() - start;
  setTimeout(schedule, Math.max(state?.running || state?.waiting ? BUSY : IDLE, 4 * spent));
}

function schedule() {
  if (document.hidden) document.addEventListener("visibilitychange", schedule, {once: true});
  else poll();
}

function rate(samples, field, end) {
  const last = samples[end];
  let first = end;
  while (first > 0 && samples[first].time > last.time - RECENT) first--;
  const time = last.time - samples[first].time;
  return time > 0 ? (last[field] - samples[first][field]) / time : 0;
}

function showChart(rates, what) {
  const most = Math.max(...rates), end = samples.at(-1).time;
  const points = rates.map((value, i) =>
    `${60 - (end - samples[i].time) / HISTORY * 60},${19 - 18 * value / (most || 1)}`);
  $("chart").firstElementChild.setAttribute("points", points.join(" "));
  $("chart-text").textContent = `${what} in the last minute; maximum ${number.format(most)}`;
  $("chart").setAttribute("aria-label", $("chart-text").textContent);
}

$("access").addEventListener("submit", event => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
});
