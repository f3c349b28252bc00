/* What the theme lacks by keyboard: scrolling of wide tables and code, Ctrl-K, and the drawers of narrow windows. */
document.addEventListener("DOMContentLoaded", () => {
  const reach = () =>
    document.querySelectorAll(".table-wrapper, pre, .sig, .sidebar-scroll, .toc-scroll").forEach((e) => {
      const high = e.matches(".sidebar-scroll, .toc-scroll") && e.scrollHeight > e.clientHeight;
      if (high || e.scrollWidth > e.clientWidth) e.tabIndex = 0;
      else e.removeAttribute("tabindex");
    });
  reach();
  new ResizeObserver(reach).observe(document.documentElement);

  // the theme opens its drawers by labels, which no key reaches: buttons replace them
  const buttons = [...document.querySelectorAll("label.nav-overlay-icon, label.toc-overlay-icon")].map((label) => {
    const button = document.createElement("button");
    button.type = "button";
    button.className = label.className;
    button.dataset.drawer = label.htmlFor;
    button.setAttribute("aria-label", label.htmlFor === "__toc" ? "On this page" : "Pages");
    button.append(...label.childNodes);
    label.replaceWith(button);
    return button;
  });
  const drawers = [...document.querySelectorAll("#__navigation, #__toc")];
  const show = (drawer, open) => {
    drawer.checked = open;
    buttons.filter((b) => b.dataset.drawer === drawer.id).forEach((b) => b.setAttribute("aria-expanded", open));
  };
  drawers.forEach((drawer) => {
    show(drawer, drawer.checked);
    drawer.addEventListener("change", () => show(drawer, drawer.checked));
  });
  buttons.forEach((button) => {
    const drawer = document.getElementById(button.dataset.drawer);
    button.addEventListener("click", () => show(drawer, !drawer.checked));
  });
  const act = (event) => {
    const at = document.activeElement;
    const free = !event.ctrlKey && !event.metaKey && !event.altKey;
    const typing = at.matches("input:not([type=checkbox]), textarea, select");
    if ((event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey)) || (event.key === "/" && free && !typing)) {
      show(drawers[0], true); // in a wide window this changes nothing
      const field = document.querySelector("input[name=q]");
      field.focus();
      field.select();
    } else if (buttons.includes(at) && free && (event.key === "Enter" || event.key === " ")) {
      show(document.getElementById(at.dataset.drawer), true);
      const drawer = document.querySelector(at.dataset.drawer === "__toc" ? ".toc-drawer" : ".sidebar-drawer");
      [...drawer.querySelectorAll("a, input")].find((e) => e.getClientRects().length)?.focus();
    } else if (event.key === "Escape" && drawers.some((d) => d.checked)) {
      const open = drawers.find((d) => d.checked);
      drawers.forEach((d) => show(d, false));
      buttons.find((b) => b.dataset.drawer === open.id && b.offsetParent)?.focus();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  };
  document.addEventListener("keydown", act, true);
});
