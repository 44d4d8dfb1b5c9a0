"""Chromium for tests, and what they ask of any page in it: legible text, nothing cut off, a quiet console."""

import os
import shutil
from pathlib import Path

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
PHONE, DESK = 390, 1280


def started(profile: Path):
    """Chromium with a profile of its own; DPFEDEXP_REQUIRE_CHROMIUM=1 turns its absence from a skip into a failure."""
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    try:
        from selenium import webdriver
        from selenium.webdriver.chrome.options import Options
        from selenium.webdriver.chrome.service import Service
    except ImportError:
        binary = None
    if not binary or not driver:
        reason = "chromium, chromedriver or the package selenium is not here; the page is not opened in a browser"
        pytest.fail(reason) if os.environ.get("DPFEDEXP_REQUIRE_CHROMIUM") == "1" else pytest.skip(reason)
    options = Options()
    options.binary_location = binary
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options=options, service=Service(driver))


def resize(browser, width: int, scheme: str) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def visit(browser, url: str, width: int = DESK, scheme: str = "light") -> None:
    """Opens an address at a width and in a color scheme; the console must have nothing to say."""
    resize(browser, width, scheme)
    browser.get(url)
    said = browser.get_log("browser")
    assert said == [], f"{url}: {said}"


def faint_texts(browser) -> list[str]:
    """Visible texts whose computed colors have less contrast than WCAG's AA asks: 4.5, or 3 for large letters."""
    return browser.execute_script(CONTRAST)


def cut_off(browser) -> list[str]:
    """Tables, code, pictures and equations that reach beyond the page or a box that hides the rest, with no way to scroll."""
    return browser.execute_script(CUT)


CONTRAST = r"""
const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true}), known = new Map();
const rgba = (color) => {
  if (!known.has(color)) {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    known.set(color, [r, g, b, a / 255]);
  }
  return known.get(color);
};
const over = ([r, g, b, a], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a), 1];
const grounds = new Map(), fades = new Map();
const ground = (element) => {
  if (!element) return [...rgba('canvas').slice(0, 3), 1];
  if (!grounds.has(element)) {
    const style = getComputedStyle(element), layer = rgba(style.backgroundColor);
    const below = layer[3] === 1 ? null : ground(element.parentElement);
    const known = style.backgroundImage === 'none' && (layer[3] === 1 || below);
    grounds.set(element, !known ? null : layer[3] === 1 ? layer : over(layer, below));
  }
  return grounds.get(element);
};
const fade = (element) => {
  if (!element) return 1;
  if (!fades.has(element)) fades.set(element, fade(element.parentElement) * parseFloat(getComputedStyle(element).opacity));
  return fades.get(element);
};
const light = ([r, g, b]) => [r, g, b].map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const seen = new Set(), faint = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode.textContent.trim(), element = walk.currentNode.parentElement;
  if (!text || seen.has(element) || element.closest('script, style, noscript, option, :disabled')) continue;
  if (!element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
  seen.add(element);
  const style = getComputedStyle(element), under = ground(element), size = parseFloat(style.fontSize);
  if (!under) continue;
  const ink = [...rgba(element.closest('svg') ? style.fill : style.color)];
  ink[3] *= fade(element);
  const [a, b] = [light(over(ink, under)), light(under)], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < (size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5))
    faint.push(`${ratio.toFixed(2)}: ${element.tagName.toLowerCase()}.${element.getAttribute('class') || ''} ${text.slice(0, 40)}`);
}
return faint;
"""

CUT = r"""
const room = document.documentElement.clientWidth, cut = [];
for (const element of document.querySelectorAll('table, pre, img, math, figure, figure svg')) {
  if (!element.checkVisibility({visibilityProperty: true})) continue;
  const right = element.getBoundingClientRect().right;
  let found = false, at = element.parentElement;
  for (; at && at !== document.body; at = at.parentElement) {
    const overflow = getComputedStyle(at).overflowX;
    if (overflow === 'auto' || overflow === 'scroll') break;
    if (overflow !== 'visible' && right > at.getBoundingClientRect().right + 1) { found = true; break; }
  }
  if (found || (at === document.body && right > room + 1))
    cut.push(`${element.tagName.toLowerCase()} ${element.textContent.trim().slice(0, 40)}`);
}
if (document.documentElement.scrollWidth > room + 1) cut.push(`the page is ${document.documentElement.scrollWidth} wide`);
return cut;
"""
