"""A scenario as one HTML page that needs no network: the Earth, the shell, the box and the beams on a canvas.

Positions are computed in the page, from the orbits' elements, by the closed form of ``Shell.positions_m``; the page
compares some of its own with Python's, and says by how much they differ.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from typing import Any

from skymemory.constellation.visibility import ground_angle_rad, ground_m
from skymemory.files import write_output
from skymemory.sim.sky.scenario import Scenario
from skymemory.view.czml import Spell, moment, timeline_of

_CHECKS = 24
_DAY_S = 86_400.0


def data_of(scenario: Scenario) -> dict[str, Any]:
    """What the page computes from. Metres, radians; seconds after the constellation's epoch where ``t`` is named.

    Raises:
        InvalidInput: the scenario's grid is not an orbit, or its file of element sets cannot be used.
    """
    shown, preset = timeline_of(scenario), scenario.preset
    shell, epoch_unix_s, start_s = preset.shell, preset.epoch_unix_s, scenario.start_s
    turned_rad = ground_angle_rad(shell.model, epoch_unix_s, 0.0)
    hosts = []
    for number, host in enumerate(scenario.ground):
        place, fixed_m = scenario.place(number), None
        if scenario.access(number) != "onboard":
            out_m, north_m = ground_m(shell.model, place.latitude_deg)
            longitude = math.radians(place.longitude_deg)
            fixed_m = [out_m * math.cos(longitude), out_m * math.sin(longitude), north_m]
        hosts.append({"name": host.name, "fixed_m": fixed_m, "beams": _spells(shown.beams[number])})
    return {
        "title": scenario.title or preset.name,
        "began": moment(epoch_unix_s + start_s),
        "start_s": start_s,
        "shown_s": shown.shown_s,
        "shell": {
            "planes": shell.planes,
            "slots": shell.slots_per_plane,
            "radius_m": shell.radius_m,
            "inclination_rad": math.radians(shell.inclination_deg),
            "period_s": shell.period_s,
            "node_rate_rad_s": shell.node_rate_rad_s,
            "nodes_rad": [shell.node_rad(plane) for plane in range(shell.planes)],
            "offsets": [
                shell.argument_rad(plane, 0) * shell.slots_per_plane / (2 * math.pi) for plane in range(shell.planes)
            ],
        },
        "earth": {
            "radius_m": shell.earth_radius_m,
            "turned_rad": turned_rad,
            "rate_rad_s": (ground_angle_rad(shell.model, epoch_unix_s, _DAY_S) - turned_rad) / _DAY_S,
        },
        "box": _spells(shown.box),
        "hosts": hosts,
        "check": _check(scenario, shown.shown_s),
    }


def _spells(spells: tuple[Spell, ...]) -> list[list[Any]]:
    """``[from_s, [[plane, slot], …]]``, the last until the end."""
    return [[round(one.from_s, 3), [list(satellite) for satellite in one.satellites]] for one in spells]


def _check(scenario: Scenario, shown_s: float) -> list[list[float]]:
    """``[t, plane, slot, x, y, z]`` of satellites all over the shell, at times all over what is shown."""
    shell, found = scenario.preset.shell, []
    for number in range(_CHECKS):
        t = scenario.start_s + shown_s * number / (_CHECKS - 1)
        plane, slot = number * 7 % shell.planes, number * 5 % shell.slots_per_plane
        found.append([t, plane, slot, *shell.positions_m(t)[plane, slot].tolist()])
    return found


def page_of(scenario: Scenario) -> str:
    """The whole page. Raises ``InvalidInput`` as ``data_of``."""
    data = data_of(scenario)
    # A script element ends at the first "</", wherever it stands.
    written = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return _PAGE.replace("%TITLE%", html.escape(data["title"])).replace("%DATA%", written)


def write_animation(scenario: Scenario, path: Path) -> Path:
    """Raises ``InvalidInput`` as ``data_of``, ``OSError`` where it cannot be written."""
    write_output(path, page_of(scenario).encode())
    return path


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>%TITLE%</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body{margin:0;background:#101820;color:#dfe7ee;font:14px/1.4 system-ui,sans-serif;display:flex;flex-direction:column;height:100vh}
header,footer{padding:8px 14px;display:flex;gap:14px;align-items:center;flex-wrap:wrap}
h1{font-size:15px;margin:0;font-weight:600}canvas{flex:1;min-height:0;width:100%;touch-action:none;cursor:grab}
input[type=range]{flex:1;min-width:140px}button,select{background:#22303c;color:inherit;border:0;padding:5px 12px;border-radius:4px}
#check{opacity:.7;margin-left:auto}
</style></head><body>
<header><h1>%TITLE%</h1><span id="now"></span><span id="check"></span></header>
<canvas id="sky" aria-label="The Earth, its satellites, the box and the beams"></canvas>
<footer><button id="play">pause</button><input id="time" type="range" min="0" max="1000" value="0" aria-label="time">
<label>speed <select id="speed"><option>1<option selected>10<option>60<option>600</select></label>
<span>drag to turn, wheel to zoom</span></footer>
<script id="data" type="application/json">%DATA%</script>
<script id="orbits">
"use strict";
// The closed form of Shell.positions_m: inertial metres at t seconds after the epoch.
function position(shell, plane, slot, t) {
  const u = 2 * Math.PI * ((slot + shell.offsets[plane]) / shell.slots + t / shell.period_s);
  const node = shell.nodes_rad[plane] + shell.node_rate_rad_s * t;
  const along = Math.cos(u), across = Math.sin(u) * Math.cos(shell.inclination_rad);
  const c = Math.cos(node), s = Math.sin(node), r = shell.radius_m;
  return [r * (c * along - s * across), r * (s * along + c * across), r * Math.sin(u) * Math.sin(shell.inclination_rad)];
}
function earthAngle(earth, t) { return earth.turned_rad + earth.rate_rad_s * t; }
function turned(v, angle) {
  const c = Math.cos(angle), s = Math.sin(angle);
  return [c * v[0] - s * v[1], s * v[0] + c * v[1], v[2]];
}
function spellAt(spells, after) {
  let found = [];
  for (const [from, satellites] of spells) { if (from > after) break; found = satellites; }
  return found;
}
// The largest distance between this page's positions and Python's, in metres.
function selfCheck(data) {
  let most = 0;
  for (const [t, plane, slot, x, y, z] of data.check) {
    const p = position(data.shell, plane, slot, t);
    most = Math.max(most, Math.hypot(p[0] - x, p[1] - y, p[2] - z));
  }
  return most;
}
</script>
<script>
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("sky"), ctx = canvas.getContext("2d");
const slider = document.getElementById("time"), speed = document.getElementById("speed"), play = document.getElementById("play");
const differs = selfCheck(data);
document.getElementById("check").textContent = differs < 0.01 ? "positions checked" : `positions differ by ${differs.toFixed(1)} m`;
const host = data.hosts.find(h => h.fixed_m);
const first = host ? turned(host.fixed_m, earthAngle(data.earth, data.start_s)) : position(data.shell, ...data.box[0][1][0], data.start_s);
let yaw = Math.atan2(first[1], first[0]), pitch = Math.atan2(first[2], Math.hypot(first[0], first[1])), zoom = 1;
let after = 0, running = true, before = performance.now();
function view(v) {  // x to the right, y up, z to the viewer; in radii of the Earth
  const w = turned(v, -yaw), R = data.earth.radius_m, c = Math.cos(pitch), s = Math.sin(pitch);
  return [w[1] / R, (c * w[2] - s * w[0]) / R, (c * w[0] + s * w[2]) / R];
}
function hidden(p) { return p[2] < 0 && Math.hypot(p[0], p[1]) < 1; }
function draw() {
  const ratio = window.devicePixelRatio || 1, W = canvas.clientWidth * ratio, H = canvas.clientHeight * ratio;
  if (canvas.width !== W || canvas.height !== H) { canvas.width = W; canvas.height = H; }
  const scale = Math.min(W, H) / 2.4 * zoom, t = data.start_s + after, angle = earthAngle(data.earth, t);
  const at = p => [W / 2 + p[0] * scale, H / 2 - p[1] * scale];
  const stroke = (points, colour, width) => {
    ctx.strokeStyle = colour; ctx.lineWidth = width * ratio; ctx.beginPath();
    let pen = false;
    for (const p of points) { if (hidden(p)) { pen = false; continue; } const [x, y] = at(p); pen ? ctx.lineTo(x, y) : ctx.moveTo(x, y); pen = true; }
    ctx.stroke();
  };
  const dot = (p, colour, size) => { const [x, y] = at(p); ctx.fillStyle = colour; ctx.beginPath(); ctx.arc(x, y, size * ratio, 0, 7); ctx.fill(); };
  ctx.clearRect(0, 0, W, H);
  ctx.fillStyle = "#1b3a52"; ctx.beginPath(); ctx.arc(W / 2, H / 2, scale, 0, 7); ctx.fill();
  const R = data.earth.radius_m * 1.0001;
  const ground = (lat, lon) => view(turned([R * Math.cos(lat) * Math.cos(lon), R * Math.cos(lat) * Math.sin(lon), R * Math.sin(lat)], angle));
  const front = points => { let part = []; for (const p of points) { if (p[2] > 0) part.push(p); else { if (part.length) stroke(part, "#3d6480", .6); part = []; } } if (part.length) stroke(part, "#3d6480", .6); };
  const rad = Math.PI / 180;
  for (let lon = -180; lon < 180; lon += 15) { const line = []; for (let lat = -90; lat <= 90; lat += 5) line.push(ground(lat * rad, lon * rad)); front(line); }
  for (let lat = -75; lat <= 75; lat += 15) { const line = []; for (let lon = -180; lon <= 180; lon += 5) line.push(ground(lat * rad, lon * rad)); front(line); }
  const box = spellAt(data.box, after), server = new Map(box.map(([p, s], n) => [p * data.shell.slots + s, n]));
  const where = (p, s) => view(position(data.shell, p, s, t));
  for (let p = 0; p < data.shell.planes; p++) for (let s = 0; s < data.shell.slots; s++) {
    if (server.has(p * data.shell.slots + s)) continue;
    const v = where(p, s);
    if (!hidden(v)) dot(v, v[2] > 0 ? "#93a1ad" : "#4a5763", 1.1);
  }
  for (const [p, s] of box) for (const [q, r] of [[(p + 1) % data.shell.planes, s], [p, (s + 1) % data.shell.slots]])
    if (server.has(q * data.shell.slots + r)) stroke([where(p, s), where(q, r)], "#2e6f95", 1.2);
  for (const h of data.hosts) {
    if (!h.fixed_m) continue;
    const here = view(turned(h.fixed_m, angle));
    for (const [p, s] of spellAt(h.beams, after)) if (here[2] > 0) stroke([here, where(p, s)], "#d1495b", 1.6);
    if (here[2] > 0) { dot(here, "#1f8a4c", 4); const [x, y] = at(here); ctx.fillStyle = "#dfe7ee"; ctx.font = `${13 * ratio}px system-ui,sans-serif`; ctx.fillText(h.name, x + 7 * ratio, y + 14 * ratio); }
  }
  box.forEach(([p, s], n) => { const v = where(p, s); if (!hidden(v)) dot(v, `hsl(${Math.round(360 * n / box.length)} 80% 60%)`, 3.2); });
  document.getElementById("now").textContent = new Date(Date.parse(data.began) + after * 1000).toISOString().slice(0, 19) + "Z";
}
function frame(now) {
  if (running) { after = (after + (now - before) / 1000 * Number(speed.value)) % data.shown_s; slider.value = 1000 * after / data.shown_s; draw(); }
  before = now; requestAnimationFrame(frame);
}
slider.oninput = () => { after = Math.min(data.shown_s, slider.value / 1000 * data.shown_s); draw(); };
play.onclick = () => { running = !running; play.textContent = running ? "pause" : "play"; };
let drag = null;
canvas.onpointerdown = e => { drag = [e.clientX, e.clientY]; canvas.setPointerCapture(e.pointerId); };
canvas.onpointermove = e => { if (!drag) return; yaw -= (e.clientX - drag[0]) * .005; pitch = Math.max(-1.5, Math.min(1.5, pitch + (e.clientY - drag[1]) * .005)); drag = [e.clientX, e.clientY]; draw(); };
canvas.onpointerup = () => { drag = null; };
canvas.onwheel = e => { e.preventDefault(); zoom = Math.max(.5, Math.min(8, zoom * Math.exp(-e.deltaY * .001))); draw(); };
window.onresize = draw;
draw(); requestAnimationFrame(frame);
</script></body></html>
"""
