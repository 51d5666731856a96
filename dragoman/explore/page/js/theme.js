// Light, dark or the system's choice, and the theme's colours for canvases.
import { byId, rootElement } from './dom.js';
import { translate } from './i18n.js';

const THEMES = ['auto', 'light', 'dark'];
const themeListeners = new Set();
let themeChoice = 'auto';
let themeOfPrint = '';

function themeStorage(value) {
  try {
    if (value === undefined) return localStorage.getItem('dragoman.theme');
    localStorage.setItem('dragoman.theme', value);
  } catch {
    // A sandboxed frame has no storage; the choice then lasts as long as the page.
  }
  return null;
}

function themeApply(button) {
  const theme = themeOfPrint || themeChoice;
  if (theme === 'auto') delete rootElement.dataset.theme;
  else rootElement.dataset.theme = theme;
  button.textContent = translate(`page.theme.${themeChoice}`);
  for (const listener of themeListeners) listener();
}

// Call after every change of colours: the switch, the system's theme, forced colours.
export function onTheme(listener) {
  themeListeners.add(listener);
}

// A custom property of app.css, without its dashes ("accent"), as a colour that a canvas understands.
export function themeColor(name) {
  const probe = byId('live');
  probe.style.color = `var(--${name})`;
  const color = getComputedStyle(probe).color;
  probe.style.color = '';
  return color;
}

export function connectTheme(button) {
  const saved = themeStorage();
  if (THEMES.includes(saved)) themeChoice = saved;
  button.addEventListener('click', () => {
    themeChoice = THEMES[(THEMES.indexOf(themeChoice) + 1) % THEMES.length];
    themeStorage(themeChoice);
    themeApply(button);
  });
  for (const query of ['(prefers-color-scheme: dark)', '(forced-colors: active)']) {
    matchMedia(query).addEventListener('change', () => themeApply(button));
  }
  // Paper is light, and canvases have no print style.
  for (const [event, theme] of [['beforeprint', 'light'], ['afterprint', '']]) {
    addEventListener(event, () => {
      themeOfPrint = theme;
      themeApply(button);
    });
  }
  themeApply(button);
  return () => themeApply(button);
}
