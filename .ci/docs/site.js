// What the theme leaves out for readers of screens and users of keyboards.
for (const caption of document.querySelectorAll(".caption[role=heading]")) caption.ariaLevel = "2";
for (const [name, label] of [["sidebar", "Site"], ["toc", "On this page"]]) {
  document.querySelector(`aside.${name}-drawer`)?.setAttribute("aria-label", label);
}
if (!document.querySelector("h1")) {
  const heading = document.createElement("h1");
  heading.textContent = document.title.split(" - ")[0];
  document.querySelector("article").prepend(heading);
}

// What is wider than its place can be scrolled by the keyboard.
const wide = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0;
    else target.removeAttribute("tabindex");
  }
});
for (const block of document.querySelectorAll("article pre, article .table-wrapper")) wide.observe(block);
