#include "ballast/data/corpus.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmath>

#include "tests/data/temporary_folder.h"

namespace ballast::data {
namespace {

std::string text_of(const Corpus& corpus, std::int64_t begin, std::int64_t count) {
  std::vector<std::int64_t> tokens(static_cast<std::size_t>(count));
  corpus.read(begin, tokens);
  return {tokens.begin(), tokens.end()};
}

TEST(Corpus, FilesOfAFolderComeInOrderOfTheirPaths) {
  TemporaryFolder folder;
  folder.write("b.py", "bbb");
  folder.write("a/z.py", "zz");
  folder.write("a/empty.py", "");
  folder.write("a.py", "a");
  folder.write("c.txt", "never");
  const Corpus corpus = Corpus::open({.path = folder.path(), .extensions = {".py"}});
  EXPECT_EQ(corpus.size(), 6);
  EXPECT_EQ(corpus.files(), 3);
  EXPECT_EQ(text_of(corpus, 0, 6), "azzbbb");  // "a.py" < "a/z.py" < "b.py" as bytes
  EXPECT_EQ(text_of(corpus, 2, 2), "zb");
  EXPECT_TRUE(corpus.describe(2).ends_with("a/z.py, token 1")) << corpus.describe(2);
  EXPECT_TRUE(corpus.describe(5).ends_with("b.py, token 2")) << corpus.describe(5);
  EXPECT_THROW(text_of(corpus, 4, 3), UseError);
}

TEST(Corpus, WideTokensAreLittleEndian) {
  TemporaryFolder folder;
  const auto file = folder.write("tokens.bin", std::string("\x01\x02\x00\x00\xff\xff\x00\x80", 8));
  std::vector<std::int64_t> tokens(4);
  Corpus::open({.path = file, .format = TokenFormat::kUInt16}).read(0, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int64_t>{0x0201, 0, 0xffff, 0x8000}));
  tokens.resize(2);
  Corpus::open({.path = file, .format = TokenFormat::kUInt32}).read(0, tokens);
  EXPECT_EQ(tokens, (std::vector<std::int64_t>{0x0201, 0x8000ffff}));
}

TEST(Corpus, EntropyIsShannons) {
  TemporaryFolder folder;
  EXPECT_EQ(order0_entropy(Corpus::open({.path = folder.write("one", std::string(1000, 'x'))})), 0);
  EXPECT_DOUBLE_EQ(order0_entropy(Corpus::open({.path = folder.write("two", "abababab")})), 1);
  const double mixed = -(0.75 * std::log2(0.75) + 0.25 * std::log2(0.25));
  EXPECT_DOUBLE_EQ(order0_entropy(Corpus::open({.path = folder.write("three", "aaab")})), mixed);
  const auto wide = folder.write("wide", std::string("\x01\x00\x01\x00\x01\x00\x00\x01", 8));
  EXPECT_DOUBLE_EQ(order0_entropy(Corpus::open({.path = wide, .format = TokenFormat::kUInt16})), mixed);
}

TEST(Corpus, ErrorsNamePathSizeAndRemedy) {
  TemporaryFolder folder;
  const auto open = [&](CorpusOptions options) { return error_text<IoError>(folder, [&] { Corpus::open(options); }); };
  EXPECT_EQ(open({.path = folder.path() / "absent"}),
            "[data.open] nothing there (DIR/absent: No such file or directory)");
  EXPECT_EQ(open({.path = folder.write("empty", "")}), "[data.open] the file is empty (DIR/empty, 0 bytes)");
  EXPECT_EQ(open({.path = folder.path()}), "[data.open] all files of the folder are empty (DIR, 0 bytes)");
  EXPECT_EQ(open({.path = folder.path(), .extensions = {".py", ".md"}}),
            "[data.open] no files to read in the folder (DIR, extensions .py .md; it holds 1 file, most often without "
            "an extension)");
  const auto odd = folder.write("odd", "abcde");
  EXPECT_EQ(open({.path = odd, .format = TokenFormat::kUInt32}),
            "[data.open] not a whole number of tokens (DIR/odd, 5 bytes, 4 bytes a token)");
  const auto binary = folder.write("image.png", std::string("\x89PNG\0\1", 6));
  EXPECT_EQ(open({.path = binary}),
            "[data.open] not text: byte 4 is zero (DIR/image.png, 6 bytes; choose files by extension, in a run file "
            "data.extensions, or allow binary ones: data.allow_binary)");
  EXPECT_EQ(Corpus::open({.path = binary, .allow_binary = true}).size(), 6);
  ::mkfifo((folder.path() / "pipe").c_str(), 0600);
  EXPECT_EQ(open({.path = folder.path() / "pipe"}), "[data.open] not a regular file (DIR/pipe)");
}

TEST(Corpus, UnreadableFileIsNamedWithTheReason) {
  TemporaryFolder folder;
  const auto file = folder.write("secret", "text");
  ::chmod(folder.path().c_str(), 0755);
  ::chmod(file.c_str(), 0);
  const bool root = ::geteuid() == 0;  // who reads every file: be nobody for the call
  if (root) {
    ASSERT_EQ(::seteuid(65534), 0);
  }
  const std::string text = error_text<IoError>(folder, [&] { Corpus::open({.path = file}); });
  if (root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  EXPECT_EQ(text, "[data.open] can't open the file (DIR/secret: Permission denied)");
}

}  // namespace
}  // namespace ballast::data
