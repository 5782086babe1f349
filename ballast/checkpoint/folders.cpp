// Small files and folders: what makes a checkpoint appear whole or not at all.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "ballast/checkpoint/descriptor.h"

namespace ballast::ckpt {

namespace fs = std::filesystem;

std::string read_text(const fs::path& path, std::int64_t most, Owner owner) {
  Descriptor file("checkpoint.read", path, O_RDONLY, owner);
  const std::int64_t bytes = file.bytes();
  if (bytes > most)
    throw IoError("checkpoint.read", "the file is longer than it may be (", path.string(), "; got ", bytes, ", most ",
                  most, " bytes", rank_text(owner), ")");
  std::string text(static_cast<std::size_t>(bytes), '\0');
  const std::int64_t got = file.read(std::as_writable_bytes(std::span(text)), 0);
  check_eq<IoError>("checkpoint.read", "short read", got, bytes, "bytes; ", path.string(), rank_text(owner));
  return text;
}

void write_text(const fs::path& path, const std::string& text, Owner owner) {
  const fs::path beside = path.parent_path() / ("." + path.filename().string() + ".saving");
  OutputFile file(beside, owner);
  file.write(std::as_bytes(std::span(text)));
  file.finish();
  if (sys::rename(beside, path, false) != 0) throw io_error("checkpoint.write", errno, path, "renaming it", owner);
}

void make_folder(const fs::path& path, Owner owner) {
  if (path.empty()) return;
  std::error_code ignored;
  if (fs::is_directory(path, ignored)) return;
  const fs::path parent = path.has_filename() ? path.parent_path() : path.parent_path().parent_path();
  if (parent != path) make_folder(parent, owner);
  if (sys::make_folder(path) != 0 && !(errno == EEXIST && fs::is_directory(path, ignored)))
    throw io_error("checkpoint.make_folder", errno, path, "", owner);
  sync_folder(parent.empty() ? "." : parent, owner);
}

void sync_folder(const fs::path& path, Owner owner) {
  const int fd = sys::open(path, O_RDONLY | O_DIRECTORY);
  if (fd < 0) throw io_error("checkpoint.sync", errno, path, "opening the folder", owner);
  const int result = sys::sync(fd, path);
  const int error = errno;
  ::close(fd);
  // Some file systems have nothing to sync in a folder and say so.
  if (result != 0 && error != EINVAL && error != ENOTSUP)
    throw io_error("checkpoint.sync", error, path, "making the folder durable", owner);
}

void move_into_place(const fs::path& from, const fs::path& to, Owner owner) {
  std::error_code ignored;
  const bool exchange = fs::exists(fs::symlink_status(to, ignored));
  if (sys::rename(from, to, exchange) == 0) return;
  if (exchange && (errno == EINVAL || errno == ENOSYS))
    throw IoError("checkpoint.rename", "this file system can't replace a checkpoint in one step (", to.string(),
                  rank_text(owner), "; save under another tag, or remove it first)");
  throw io_error("checkpoint.rename", errno, to, "from " + from.string(), owner);
}

void rename_folder(const fs::path& from, const fs::path& to, Owner owner) {
  if (sys::rename(from, to, false) != 0) throw io_error("checkpoint.rename", errno, to, "from " + from.string(), owner);
}

void remove_folder(const fs::path& path, Owner owner) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(path, error))) return;
  if (fs::is_directory(fs::symlink_status(path, error)))
    for (const std::string& name : list_folder(path, owner)) remove_folder(path / name, owner);
  if (sys::remove(path) != 0 && errno != ENOENT) throw io_error("checkpoint.remove", errno, path, "", owner);
}

std::vector<std::string> list_folder(const fs::path& path, Owner owner) {
  std::vector<std::string> names;
  std::error_code error;
  fs::directory_iterator entry(path, error);
  if (error == std::errc::no_such_file_or_directory) return names;
  for (; !error && entry != fs::directory_iterator(); entry.increment(error))
    names.push_back(entry->path().filename().string());
  if (error) throw io_error("checkpoint.list", error.value(), path, "", owner);
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace ballast::ckpt
