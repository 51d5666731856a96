// The keyboard: F6 between regions, arrows inside a widget, single letters while focus is in a widget, ? for help.
import { addStrings, translate } from './i18n.js';
import { element } from './dom.js';

addStrings(
  {
    'keys.title': 'Keys',
    'keys.note': 'Single letters work while the focus is inside a panel’s widget, never while you type.',
    'keys.f6': 'Next panel (with Shift: the one before)',
    'keys.arrows': 'Move inside the text, the tree, the heads or a matrix',
    'keys.enter': 'Select, or take the alternative',
    'keys.space': 'Switch the head off or on',
    'keys.a': 'Alternatives of the selected token',
    'keys.b': 'Beam search',
    'keys.h': 'Heads',
    'keys.t': 'Token',
    'keys.m': 'Attention weights or contribution',
    'keys.layer': 'Layer before, layer after',
    'keys.head': 'Head before, head after',
    'keys.escape': 'Back to the translation',
    'keys.help': 'This list',
  },
  {
    'keys.title': '按键',
    'keys.note': '单个字母只在焦点位于面板部件内时有效，打字时无效。',
    'keys.f6': '下一个面板（加 Shift：上一个）',
    'keys.arrows': '在文字、树、各头或矩阵中移动',
    'keys.enter': '选择，或采用这个备选',
    'keys.space': '关闭或打开这个头',
    'keys.a': '选中词元的备选',
    'keys.b': '束搜索',
    'keys.h': '所有头',
    'keys.t': '词元',
    'keys.m': '注意力权重或贡献',
    'keys.layer': '上一层，下一层',
    'keys.head': '上一个头，下一个头',
    'keys.escape': '回到译文',
    'keys.help': '这份列表',
  },
);

const KEYS_HELP = [
  ['F6', 'keys.f6'],
  ['← ↑ → ↓', 'keys.arrows'],
  ['Enter', 'keys.enter'],
  ['Space', 'keys.space'],
  ['A', 'keys.a'],
  ['B', 'keys.b'],
  ['H', 'keys.h'],
  ['T', 'keys.t'],
  ['M', 'keys.m'],
  ['[  ]', 'keys.layer'],
  [',  .', 'keys.head'],
  ['Escape', 'keys.escape'],
  ['?', 'keys.help'],
];

function keysTyping(target) {
  return target.closest?.('input, textarea, select, [contenteditable]') !== null;
}

// One tab stop for many items: arrows, Home and End move the focus. Options:
//   items()    the focusable elements in order
//   columns()  how many stand in a row, for up and down in a grid; null where up and down do not move
//   rtl()      whether left means next
//   vertical   up and down move by one as well (a list)
//   onMove(el) called with the element that gets the focus
// Returns {focus(el), refresh()}: refresh after the items were made anew.
export function rovingFocus(container, options) {
  const { items, columns = () => null, rtl = () => false, vertical = false, onMove = () => {} } = options;
  let current = null;
  const refresh = (wanted = current) => {
    const all = items();
    current = all.includes(wanted) ? wanted : (all.find((each) => each.matches('[aria-selected="true"], [aria-pressed="true"], [aria-current="true"]')) ?? all[0] ?? null);
    for (const each of all) each.tabIndex = each === current ? 0 : -1;
  };
  const focus = (target) => {
    if (!target) return;
    refresh(target);
    target.focus({ preventScroll: false });
    onMove(target);
  };
  container.addEventListener('focusin', (event) => {
    if (event.target !== current && items().includes(event.target)) refresh(event.target);
  });
  container.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || keysTyping(event.target)) return;
    const all = items();
    const at = all.indexOf(event.target);
    if (at < 0) return;
    const wide = columns();
    const forward = rtl() ? 'ArrowLeft' : 'ArrowRight';
    const back = rtl() ? 'ArrowRight' : 'ArrowLeft';
    let next = null;
    if (event.key === forward) next = at + 1;
    else if (event.key === back) next = at - 1;
    else if (event.key === 'ArrowDown' && (wide || vertical)) next = at + (wide ?? 1);
    else if (event.key === 'ArrowUp' && (wide || vertical)) next = at - (wide ?? 1);
    else if (event.key === 'Home') next = 0;
    else if (event.key === 'End') next = all.length - 1;
    if (next === null) return;
    event.preventDefault();
    if (next >= 0 && next < all.length) focus(all[next]);
  });
  refresh();
  return { focus, refresh };
}

function keysShowHelp() {
  const dialog = document.getElementById('help');
  const close = element('button', { type: 'button', class: 'plain', onclick: () => dialog.close() }, translate('page.close'));
  dialog.replaceChildren(
    element('h2', { id: 'help-title' }, translate('keys.title')),
    element('p', { class: 'quiet' }, translate('keys.note')),
    element('dl', { class: 'keys' }, KEYS_HELP.map(([key, text]) =>
      element('div', {}, element('dt', {}, element('kbd', {}, key)), element('dd', {}, translate(text))))),
    close,
  );
  if (!dialog.open) dialog.showModal();
  close.focus();
}

// `actions` maps a key ("a", "[") to a function; it runs while the focus is inside [data-widget].
export function connectKeys({ views, visit, actions }) {
  document.getElementById('tool-help').addEventListener('click', keysShowHelp);
  document.addEventListener('keydown', (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === 'F6') {
      event.preventDefault();
      const shown = views.filter((view) => !document.getElementById(`panel-${view}`).hidden);
      const here = document.activeElement?.closest?.('section.panel')?.id.replace('panel-', '');
      const at = shown.indexOf(here);
      const next = event.shiftKey
        ? shown[(at <= 0 ? shown.length : at) - 1]
        : shown[(at + 1) % shown.length];
      visit(next);
      return;
    }
    if (keysTyping(event.target) || document.getElementById('help').open) return;
    if (event.key === '?') {
      event.preventDefault();
      keysShowHelp();
      return;
    }
    if (!event.target.closest?.('[data-widget]')) return;
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
}
