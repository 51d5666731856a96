// Elements without markup strings: element('button', {class: 'plain', onclick: f}, 'Text', child).

export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAttributes(node, attributes);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// Attributes by name; `onclick: f` adds a listener, `hidden: false` removes, `var: {p: 0.5}` sets custom properties.
export function setAttributes(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'var') {
      for (const [key, entry] of Object.entries(value)) node.style.setProperty(`--${key}`, entry);
    } else if (name.startsWith('aria-') && typeof value === 'boolean') node.setAttribute(name, value);
    else if (value === false || value === null || value === undefined) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? '' : value);
  }
  return node;
}
