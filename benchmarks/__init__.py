"""Programs that measure, predict and compare. They import the other packages, which never import them."""
