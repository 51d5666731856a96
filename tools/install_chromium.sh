#!/bin/sh
# Make sure that the tests of the explorer page find a Chromium, and print the result in one line.
# Installs Debian's package where that needs no questions (root and apt-get); never fails: without
# a browser those tests are skipped with the reason.
for name in "${DRAGOMAN_CHROMIUM:-chromium}" chromium chromium-browser google-chrome; do
	if path=$(command -v "$name"); then
		echo "chromium: found $path"
		exit 0
	fi
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
	echo "chromium: none found; the tests of the explorer page are skipped (install chromium, or set DRAGOMAN_CHROMIUM)"
	exit 0
fi
install() {
	DEBIAN_FRONTEND=noninteractive timeout 300 apt-get -qq -o Acquire::Retries=1 \
		-o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20 "$@" >/dev/null 2>&1 </dev/null
}
if install install -y --no-install-recommends chromium ||
	{ install update && install install -y --no-install-recommends chromium; }; then
	echo "chromium: installed $(command -v chromium) with apt-get"
else
	echo "chromium: apt-get could not install it; the tests of the explorer page are skipped"
fi
exit 0
