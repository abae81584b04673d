#!/bin/sh
# Runs on the host as mmdebstrap's customize hook: customize.sh ROOT STAGE
# STAGE/overlay goes over ROOT, the kernel's image to STAGE/kernel, its modules into ROOT; then setup.sh runs inside ROOT.
set -eu
root=$1
stage=$2

cp -dR --preserve=mode,timestamps "$stage/overlay/." "$root/"

# The kernel is unpacked, not installed: the VM is booted from outside, so no initramfs-tools, no boot loader hooks,
# and no upgrade inside a sandbox that could part the modules from the kernel that runs.
mkdir "$stage/kernel"
cd "$stage/kernel"
APT_CONFIG=$MMDEBSTRAP_APT_CONFIG
export APT_CONFIG
package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/^ *Depends: \(linux-image-[0-9].*-cloud-amd64\)$/\1/p')
apt-get -q -o APT::Sandbox::User=root download "$package"
dpkg-deb -x ./*.deb unpacked
version=$(basename unpacked/lib/modules/*)
mkdir -p "$root/usr/lib/modules"
cp -dR --preserve=mode,timestamps "unpacked/lib/modules/$version" "$root/usr/lib/modules/"
cp "unpacked/boot/vmlinuz-$version" vmlinuz
printf '%s' "$version" > version
rm -rf unpacked ./*.deb
chroot "$root" depmod "$version"

cp "$stage/setup.sh" "$root/setup.sh"
chroot "$root" sh /setup.sh
rm "$root/setup.sh"
