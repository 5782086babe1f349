#include "ballast/data/windows.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>

#include "tests/data/temporary_folder.h"

namespace ballast::data {
namespace {

std::shared_ptr<const Corpus> corpus_of(const TemporaryFolder& folder, std::int64_t bytes) {
  std::string text;
  for (std::int64_t i = 0; i < bytes; ++i) text += static_cast<char>('!' + i % 90);
  return std::make_shared<const Corpus>(Corpus::open({.path = folder.write("text", text)}));
}

// Every whole window of the corpus belongs to exactly one part, at every size and share.
TEST(Windows, PartsCoverTheCorpusOnce) {
  TemporaryFolder folder;
  for (const std::int64_t bytes : {9, 10, 57, 1000, 4097, 40001})
    for (const double held_out : {0.0, 0.01, 0.1, 0.37, 0.5}) {
      const std::int64_t total = (bytes - 1) / 4;
      const Windows windows(corpus_of(folder, bytes), {.length = 4, .held_out = held_out});
      std::set<std::int64_t> starts;
      for (const Part part : {Part::kTrain, Part::kHeldOut})
        for (std::int64_t i = 0; i < windows.count(part); ++i) {
          const std::int64_t start = windows.start(part, i);
          EXPECT_EQ(start % 4, 0);
          EXPECT_TRUE(starts.insert(start).second) << start << " twice";
          if (i > 0) {
            EXPECT_GT(start, windows.start(part, i - 1));
          }
        }
      EXPECT_EQ(static_cast<std::int64_t>(starts.size()), total) << bytes << " bytes, " << held_out;
      EXPECT_EQ(*starts.rbegin(), 4 * (total - 1));
      if (held_out > 0) {
        EXPECT_NEAR(static_cast<double>(windows.count(Part::kHeldOut)), held_out * static_cast<double>(total), 1);
        EXPECT_GE(windows.count(Part::kHeldOut), 1);
      }
      EXPECT_THROW(windows.start(Part::kTrain, windows.count(Part::kTrain)), UseError);
    }
}

TEST(Windows, HeldOutRunsAreSpreadOverTheCorpus) {
  TemporaryFolder folder;
  const Windows windows(corpus_of(folder, 64001), {.length = 4, .held_out = 0.02});  // 16000 windows, 320 held out
  std::vector<std::int64_t> firsts;
  for (std::int64_t i = 0; i < windows.count(Part::kHeldOut); ++i)
    if (i == 0 || windows.start(Part::kHeldOut, i) != windows.start(Part::kHeldOut, i - 1) + 4)
      firsts.push_back(windows.start(Part::kHeldOut, i));
  EXPECT_EQ(firsts, (std::vector<std::int64_t>{12544, 25344, 38144, 50944, 63744}));  // 5 runs, each ends a fifth
}

TEST(Windows, TargetsAreTheNextTokens) {
  TemporaryFolder folder;
  const Windows windows(corpus_of(folder, 41), {.length = 4, .held_out = 0.1});
  const std::vector<std::int64_t> indices{2, 0};
  const Batch batch = windows.read(Part::kTrain, indices);
  EXPECT_EQ(batch.tokens(), 8);
  const at::Tensor first = at::arange('!', '!' + 4, at::kLong);
  EXPECT_TRUE(batch.inputs.equal(at::stack({first + 8, first})));
  EXPECT_TRUE(batch.targets.equal(batch.inputs + 1));
}

TEST(Windows, ErrorsShowBothSizes) {
  TemporaryFolder folder;
  const auto make = [&](std::int64_t bytes, WindowOptions options) {
    const auto corpus = corpus_of(folder, bytes);
    return error_text<Error>(folder, [&] { Windows(corpus, options); });
  };
  EXPECT_EQ(make(40, {.length = 40, .held_out = 0}),
            "[data.windows] too short for a window (DIR/text: 40 tokens, needed 41 with windows of 40; "
            "give more text, or shorter windows: in a run file model.context)");
  EXPECT_EQ(make(41, {.length = 40, .held_out = 0.1}),
            "[data.windows] too short for a window of training and one held out (DIR/text: 41 tokens, needed 81 with "
            "windows of 40; give more text, or shorter windows: in a run file model.context)");
  EXPECT_EQ(make(41, {.length = 0}), "[data.windows] must be at least 1 (length = 0)");
  EXPECT_EQ(make(41, {.length = 4, .held_out = 0.7}), "[data.windows] must be in [0, 0.5] (held_out = 0.7)");
}

TEST(Windows, TokenOutsideTheVocabularyIsPlaced) {
  TemporaryFolder folder;
  const Windows windows(corpus_of(folder, 90), {.length = 10, .held_out = 0, .vocabulary = 100});
  EXPECT_EQ(error_text<IoError>(folder,
                                [&] {
                                  const std::vector<std::int64_t> indices{0, 5};
                                  windows.read(Part::kTrain, indices);
                                }),
            "nothing was thrown");
  EXPECT_EQ(error_text<IoError>(folder,
                                [&] {
                                  const std::vector<std::int64_t> indices{0, 7};
                                  windows.read(Part::kTrain, indices);
                                }),
            "[data.read] token outside the vocabulary (got 103, vocabulary 100; DIR/text, token 70)");
}

}  // namespace
}  // namespace ballast::data
