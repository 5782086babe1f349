#pragma once

#include <cstddef>
#include <filesystem>
#include <span>

namespace ballast::data {

/// A regular file mapped for reading: its pages come from the page cache, which all ranks of a host share. Move-only.
/// The file must not shrink while it is mapped; the system kills a process that reads past its end.
class MappedFile {
 public:
  /// Throws IoError (path, errno text) where it can't be opened, isn't a regular file, or can't be mapped.
  explicit MappedFile(const std::filesystem::path& path);
  MappedFile(MappedFile&& from) noexcept;
  MappedFile& operator=(MappedFile from) noexcept;
  ~MappedFile();

  std::span<const std::byte> bytes() const noexcept { return {start_, size_}; }
  const std::filesystem::path& path() const noexcept { return path_; }

 private:
  std::filesystem::path path_;
  const std::byte* start_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace ballast::data
