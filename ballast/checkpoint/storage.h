#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

/// What is saved and loaded: files, their formats and their folders.
namespace ballast::ckpt {

/// Whose files these are, for error texts: a rank, or nobody in particular (-1).
struct Owner {
  int rank = -1;
};

/// A new file, written from its begin to its end: past the page cache (O_DIRECT) where its file system accepts that,
/// several writes at once from buffers of its own. What fails is an IoError with the path, the bytes and the rank; from
/// then on every call throws it again. Interrupted and short writes are resumed.
class OutputFile {
 public:
  /// bytes: that it will have, where that is known. A full disk then shows at once, and writes that don't lengthen the
  /// file run side by side.
  OutputFile(std::filesystem::path path, Owner owner, std::int64_t bytes = 0);
  ~OutputFile();  // waits for writes in flight and closes; never throws, deletes nothing
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> data);
  /// Writes the rest, makes all of it durable and closes the file.
  void finish();
  std::int64_t bytes() const;  // given to write() so far

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// A file that is read in parts, best in the order in which they lie: what comes next is then read ahead, past the page
/// cache where the file system accepts that, into a few buffers (24 MiB). One thread drives read(). IoError as above,
/// also where the file ends too early.
class InputFile {
 public:
  InputFile(std::filesystem::path path, Owner owner);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const;
  std::int64_t bytes() const;  // when it was opened
  void read(std::int64_t offset, std::span<std::byte> to);
  /// Past those buffers, from any thread: whole pages (4096 bytes) of the file to memory that begins with one. `least`
  /// bytes of them are there, or IoError.
  void read_pages(std::int64_t offset, std::span<std::byte> to, std::int64_t least) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Small files, whole. read_text: IoError where it is longer than `most` bytes.
std::string read_text(const std::filesystem::path& path, std::int64_t most, Owner owner);
/// Under a temporary name beside (".NAME.saving"), durable, then renamed: readers see the old file or the new one.
void write_text(const std::filesystem::path& path, const std::string& text, Owner owner);

/// Folders. All throw IoError.
void make_folder(const std::filesystem::path& path, Owner owner);  // with its parents; fine where it exists
void sync_folder(const std::filesystem::path& path, Owner owner);  // makes renames in it durable
/// Puts `from` in the place of `to`. Where there is a `to`, the two change places in one step.
void move_into_place(const std::filesystem::path& from, const std::filesystem::path& to, Owner owner);
void rename_folder(const std::filesystem::path& from, const std::filesystem::path& to, Owner owner);
/// With all that is in it; fine where there is none.
void remove_folder(const std::filesystem::path& path, Owner owner);
/// Names in a folder, sorted; none where it doesn't exist.
std::vector<std::string> list_folder(const std::filesystem::path& path, Owner owner);

}  // namespace ballast::ckpt
