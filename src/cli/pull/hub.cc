#include "cli/pull/hub.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "core/files.h"
#include "core/sha256.h"
#include "io/atomic_file.h"

namespace lacuna::cli::pull {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kDoneMark = ".lacuna-pulled.json";
constexpr const char* kSmallFiles[] = {
    "config.json",           "generation_config.json",  "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "vocab.json",     "merges.txt",
    "added_tokens.json",     "chat_template.jinja"};
constexpr const char* kIndex = "model.safetensors.index.json";

struct RemoteFile {
  std::string name, sha256;  // sha256 of large files only
  int64_t size = -1;
};

json parse_answer(const std::string& text, const std::string& where) {
  json answer = json::parse(text, nullptr, false);
  if (answer.is_discarded()) throw Error("{}: the answer is no JSON; is this a hub?", where);
  return answer;
}

/// A name from the network that will become a path: relative, inside its folder.
void check_file_name(const std::string& name, const std::string& where) {
  const fs::path path(name);
  const bool inside = !name.empty() && !path.is_absolute() && name.find('\\') == std::string::npos &&
                      std::none_of(path.begin(), path.end(), [](const fs::path& part) { return part == ".."; });
  if (!inside) throw Error("{}: the file name '{}' leads out of the folder; refused", where, name);
}

struct Listing {
  std::string commit;
  std::vector<RemoteFile> files;
  const RemoteFile* find(std::string_view name) const {
    for (const RemoteFile& file : files)
      if (file.name == name) return &file;
    return nullptr;
  }
};

Listing list(const Http& http, const std::string& endpoint, const HubName& name) {
  const std::string url =
      fmt::format("{}/api/models/{}/{}/revision/{}?blobs=true", endpoint, escape_segment(name.owner),
                  escape_segment(name.repo), escape_segment(name.revision));
  const json answer = parse_answer(http.get(url), url);
  Listing out;
  try {
    out.commit = answer.value("sha", name.revision);
    for (const json& sibling : answer.at("siblings")) {
      RemoteFile file;
      file.name = sibling.at("rfilename").get<std::string>();
      check_file_name(file.name, url);
      if (sibling.contains("size") && sibling["size"].is_number_integer()) file.size = sibling["size"].get<int64_t>();
      if (sibling.contains("lfs") && sibling["lfs"].is_object()) file.sha256 = sibling["lfs"].value("sha256", "");
      out.files.push_back(std::move(file));
    }
  } catch (const json::exception&) {
    throw Error("{}: the answer does not list the repository's files", url);
  }
  return out;
}

/// "x-00001-of-00003.gguf" -> all three names.
std::vector<std::string> split_parts(const std::string& file) {
  constexpr std::string_view kForm = "-00001-of-00003.gguf";
  if (file.size() < kForm.size()) return {file};
  const std::string tail = file.substr(file.size() - kForm.size());
  const auto digits = [&](size_t at) {
    return std::all_of(tail.begin() + long(at), tail.begin() + long(at) + 5, ::isdigit);
  };
  if (tail[0] != '-' || tail.substr(6, 4) != "-of-" || tail.substr(15) != ".gguf" || !digits(1) || !digits(10))
    return {file};
  std::vector<std::string> out;
  const int count = std::stoi(tail.substr(10, 5));
  for (int part = 1; part <= count; ++part)
    out.push_back(fmt::format("{}-{:05}-of-{:05}.gguf", file.substr(0, file.size() - kForm.size()), part, count));
  return out;
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

/// What finish() left in the folder, null: nothing of this repository.
json finished_mark(const fs::path& folder, const HubName& name) {
  json mark = json::parse(read_file(folder / kDoneMark), nullptr, false);
  const bool ours = mark.is_object() && mark.contains("files") && mark["files"].is_object() &&
                    mark.contains("repository") && mark["repository"] == name.repository();
  return ours ? mark : json();
}

/// The folder as its mark says it was finished, if all its files are still there with their sizes.
std::optional<Pulled> finished_folder(const fs::path& folder, const HubName& name) {
  const json mark = finished_mark(folder, name);
  if (mark.is_null() || !mark.contains("revision") || mark["revision"] != name.revision) return std::nullopt;
  Pulled out{folder.string(), 0, "", "", true};
  for (const auto& [file, size] : mark["files"].items()) {
    std::error_code missing;
    const auto found = fs::file_size(folder / file, missing);
    if (missing || !size.is_number_integer() || int64_t(found) != size.get<int64_t>()) return std::nullopt;
    out.bytes += int64_t(found);
  }
  return out;
}

const RemoteFile& needed(const Listing& listing, const HubName& name, const std::string& file) {
  if (const RemoteFile* found = listing.find(file)) return *found;
  throw Error("hf:{}: holds no {} at revision {}", name.repository(), file, name.revision);
}

Error other_file(const fs::path& path, const HubName& name, const std::string& sum, const std::string& expected) {
  return Error(
      "{}: is there already, but it is not {} of hf:{}@{}: its sha256 is {}, expected {}; move it away and try again",
      path.string(), name.file, name.repository(), name.revision, sum,
      expected.empty() ? "one that the hub does not tell" : expected);
}

class Snapshot {
 public:
  Snapshot(const Http& http, std::string endpoint, const HubName& name, const Listing& listing, fs::path folder)
      : http_(http), endpoint_(std::move(endpoint)), name_(name), listing_(listing), folder_(std::move(folder)) {
    const json mark = finished_mark(folder_, name);
    same_commit_ = mark.is_object() && mark.contains("commit") && mark["commit"] == listing.commit;
    // Files of two commits may lie here until finish().
    if (!same_commit_) fs::remove(folder_ / kDoneMark);
  }

  void bring(const RemoteFile& file) {
    const fs::path path = folder_ / file.name;
    if (!is_there(file, path))
      http_.download(
          {resolve_url(endpoint_, name_, listing_.commit, file.name), path.string(), file.sha256, file.size});
    sizes_[file.name] = file_bytes(path);
  }
  static std::string resolve_url(const std::string& endpoint, const HubName& name, const std::string& revision,
                                 const std::string& file) {
    return fmt::format("{}/{}/{}/resolve/{}/{}", endpoint, escape_segment(name.owner), escape_segment(name.repo),
                       escape_segment(revision), escape_path(file));
  }
  void finish() {
    io::write_file_atomically((folder_ / kDoneMark).string(), json{{"repository", name_.repository()},
                                                                   {"revision", name_.revision},
                                                                   {"commit", listing_.commit},
                                                                   {"files", sizes_}}
                                                                  .dump());
  }

 private:
  /// The file of this commit, not one of another commit that has its name and size. Without a sum to compare (small
  /// files) only the mark tells.
  bool is_there(const RemoteFile& file, const fs::path& path) const {
    std::error_code missing;
    const auto size = fs::file_size(path, missing);
    if (missing || (file.size >= 0 && int64_t(size) != file.size)) return false;
    return file.sha256.empty() ? same_commit_ : sha256_file(path.string()) == file.sha256;
  }

  const Http& http_;
  std::string endpoint_;
  const HubName& name_;
  const Listing& listing_;
  fs::path folder_;
  bool same_commit_ = false;  // that was finished here before
  std::map<std::string, int64_t> sizes_;
};

/// Shards that the index names.
std::set<std::string> indexed_shards(const fs::path& index) {
  std::set<std::string> out;
  const json parsed = parse_answer(read_file(index), index.string());
  if (!parsed.is_object() || !parsed.contains("weight_map") || !parsed["weight_map"].is_object())
    throw Error("{}: the index has no weight_map", index.string());
  for (const auto& [tensor, shard] : parsed["weight_map"].items()) {
    if (!shard.is_string()) throw Error("{}: the shard of tensor {} is no name", index.string(), tensor);
    out.insert(shard.get<std::string>());
  }
  return out;
}

/// A place that the user chose may hold anybody's file: it is compared, never replaced. In the models folder a name
/// says repository and revision, so that what stands there was finished by an earlier pull of it.
Pulled pull_single(const Http& http, const std::string& endpoint, const HubName& name, const fs::path& path,
                   bool chosen, const std::string& sha256) {
  Pulled out{path.string(), 0, "", endpoint, true};
  if (!file_exists(path)) {
    const Downloaded got =
        http.download({Snapshot::resolve_url(endpoint, name, name.revision, name.file), path.string(), sha256, -1});
    out.sha256 = got.sha256;
    out.already_there = false;
  } else if (!sha256.empty() || chosen) {
    std::string expected = sha256;
    if (expected.empty()) {
      const Listing listing = list(http, endpoint, name);
      expected = needed(listing, name, name.file).sha256;
    }
    out.sha256 = sha256_file(path.string());
    if (out.sha256 != expected) throw other_file(path, name, out.sha256, expected);
  }
  out.bytes = file_bytes(path);
  return out;
}

/// All parts of a split GGUF, from one commit even if the branch moves meanwhile.
Pulled pull_parts(const Http& http, const std::string& endpoint, const HubName& name,
                  const std::vector<std::string>& parts, const fs::path& path, bool chosen) {
  Pulled out{path.string(), 0, "", endpoint, true};
  std::vector<fs::path> targets;
  for (const std::string& part : parts) targets.push_back(path.parent_path() / fs::path(part).filename());
  const auto is_there = [](const fs::path& target) { return file_exists(target); };
  if (chosen || !std::all_of(targets.begin(), targets.end(), is_there)) {
    const Listing listing = list(http, endpoint, name);
    // Parts of another commit go before the first new one comes: a complete set is always of one commit.
    for (size_t i = 0; i < parts.size(); ++i) {
      const RemoteFile& file = needed(listing, name, parts[i]);
      if (!is_there(targets[i])) continue;
      const std::string sum = sha256_file(targets[i].string());
      if (sum == file.sha256) continue;
      if (chosen) throw other_file(targets[i], name, sum, file.sha256);
      fs::remove(targets[i]);
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      if (is_there(targets[i])) continue;
      const RemoteFile& file = needed(listing, name, parts[i]);
      http.download({Snapshot::resolve_url(endpoint, name, listing.commit, file.name), targets[i].string(), file.sha256,
                     file.size});
      out.already_there = false;
    }
  }
  for (const fs::path& target : targets) out.bytes += file_bytes(target);
  return out;
}

Pulled pull_file(const Http& http, const std::string& endpoint, const HubName& name, const fs::path& path, bool chosen,
                 const std::string& sha256) {
  const std::vector<std::string> parts = split_parts(name.file);
  if (parts.size() <= 1) return pull_single(http, endpoint, name, path, chosen, sha256);
  if (!sha256.empty()) throw Error("--sha256: {} is one of {} parts; leave the flag out", name.file, parts.size());
  return pull_parts(http, endpoint, name, parts, path, chosen);
}

}  // namespace

HubName HubName::parse(std::string_view text) {
  HubName out;
  const size_t first = text.find('/');
  const size_t second = first == std::string_view::npos ? first : text.find('/', first + 1);
  if (first != std::string_view::npos) {
    out.owner = text.substr(0, first);
    out.repo = text.substr(first + 1, second == std::string_view::npos ? second : second - first - 1);
    if (second != std::string_view::npos) out.file = text.substr(second + 1);
    if (const size_t at = out.repo.find('@'); at != std::string::npos) {
      out.revision = out.repo.substr(at + 1);
      out.repo.resize(at);
    }
  }
  if (out.owner.empty() || out.repo.empty() || out.revision.empty() ||
      (second != std::string_view::npos && out.file.empty()))
    throw Error("hf:{}: expected hf:OWNER/REPO, hf:OWNER/REPO/FILE or hf:OWNER/REPO@REVISION/FILE", text);
  for (const std::string& part : {out.owner, out.repo}) check_file_name(part, fmt::format("hf:{}", text));
  if (!out.file.empty()) check_file_name(out.file, fmt::format("hf:{}", text));
  return out;
}

Pulled pull_from_hub(const Http& http, const std::string& endpoint, const HubName& wanted,
                     const std::string& models_dir, const std::string& target, const std::string& sha256) {
  HubName name = wanted;
  const std::string revision = name.revision == "main" ? "" : "@" + escape_segment(name.revision);
  const fs::path folder =
      target.empty() ? fs::path(models_dir) / name.owner / (name.repo + revision) : fs::path(target);
  const auto file_path = [&] { return target.empty() ? folder / name.file : fs::path(target); };
  if (!name.file.empty()) return pull_file(http, endpoint, name, file_path(), !target.empty(), sha256);
  if (!sha256.empty()) throw Error("--sha256 needs one file: name it, as in hf:{}/FILE", name.repository());
  if (const auto done = finished_folder(folder, name)) return *done;

  const Listing listing = list(http, endpoint, name);
  const RemoteFile* index = listing.find(kIndex);
  const RemoteFile* single = listing.find("model.safetensors");
  if (!listing.find("config.json") || (!index && !single)) {
    std::vector<std::string> ggufs;
    for (const RemoteFile& file : listing.files)
      if (file.name.ends_with(".gguf")) ggufs.push_back(file.name);
    if (ggufs.empty())
      throw Error("hf:{}: holds neither safetensors with a config.json nor GGUF files; nothing here can be run",
                  name.repository());
    if (ggufs.size() > 1) {
      std::string names;
      for (const std::string& file : ggufs) names += (names.empty() ? "" : ", ") + file;
      throw Error("hf:{}: holds several GGUF files; name one, as in hf:{}/{} (there are {})", name.repository(),
                  name.repository(), ggufs[0], names);
    }
    name.file = ggufs[0];
    return pull_file(http, endpoint, name, file_path(), !target.empty(), "");
  }

  Snapshot snapshot(http, endpoint, name, listing, folder);
  for (const char* small : kSmallFiles)
    if (const RemoteFile* file = listing.find(small)) snapshot.bring(*file);
  if (index) {
    snapshot.bring(*index);
    for (const std::string& shard : indexed_shards(folder / kIndex)) {
      const RemoteFile* file = listing.find(shard);
      if (!file) throw Error("hf:{}: the index names {}, which the repository does not hold", name.repository(), shard);
      snapshot.bring(*file);
    }
  } else {
    snapshot.bring(*single);
  }
  snapshot.finish();
  Pulled out = finished_folder(folder, name).value();
  out.source = endpoint;
  out.already_there = false;
  return out;
}

}  // namespace lacuna::cli::pull
